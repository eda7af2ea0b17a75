"""What is done with a policy that is there: load it, ask it, measure it, hand it on.

loaded     a policy of a run's checkpoint, or a bare model on a task
asked      its responses with all that is known of them
held_out   greedy and sampled accuracy, pass@k, majority vote (`ascent eval`)
sampling   what it says to a prompt (`ascent sample`)
exporting  the model as an ordinary Hugging Face folder (`ascent export`)
"""
