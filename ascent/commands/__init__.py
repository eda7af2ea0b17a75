"""What a person types after `ascent`: flags into settings, settings into work, and what is printed of it.

    flags      flags into settings, for every command that trains
    ask        `ascent eval`, `ascent sample`, `ascent export`
    compare    `ascent compare`
    demo       `ascent demo`
    data       `ascent pairs`, `ascent label`, `ascent label-steps`
    learn      `ascent sft`, `ascent dpo`, `ascent reward-model`, `ascent process-reward`
    rounds     `ascent rounds`
    terminal   runs and plans as text

The others are in cli.py.
"""
