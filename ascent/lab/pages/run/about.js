// What a run's page says besides its curves: above them what became of it, below them all that is known.
import { Noting } from "/static/noting.js";
import { Badge, completionsLink, Component, count, date, html, num, Tags, words } from "/static/shared.js";

const said = (name) => words(name).replaceAll(/[_-]/g, " ");

const Flag = ({ flag, id, onSee }) => {
  const { metrics, steps, rollouts } = flag.evidence ?? {};
  const show = rollouts?.show && rollouts.show !== "all" ? `, ${rollouts.show}` : "";
  return html`<li class="flag">
    <p><i aria-hidden="true">⚑</i> <b>${said(flag.name)}</b> <span class="note">step ${num(flag.step)}</span><br />${words(flag.text)}</p>
    ${flag.evidence && html`<p class="evidence">
      ${Object.entries(metrics ?? {}).map(([name, values]) => html`<span key=${name}><code>${name}</code> ${[values ?? []].flat().map((value) => num(value)).join(" → ")}</span>`)}
      ${steps?.length === 2 && html`<button type="button" class="plain" onClick=${() => onSee(steps, flag.step)}>${steps[0] === steps[1] ? `see step ${num(steps[0])}` : `zoom to steps ${num(steps[0])} to ${num(steps[1])}`}</button>`}
      ${rollouts?.step != null && html`<a href=${completionsLink(id, rollouts.step, { show: rollouts.show, q: rollouts.q })}>completions that show it (step ${num(rollouts.step)}${show}${rollouts.q ? `, “${rollouts.q}”` : ""})</a>`}
    </p>`}
  </li>`;
};

class Notes extends Component {
  render({ about, onNoted }, { editing }) {
    const { notes } = about;
    if (editing) return html`<div class="notes"><${Noting} id=${about.id} notes=${notes} onDone=${(saved) => (this.setState({ editing: false }), saved && onNoted(saved))} /></div>`;
    const any = notes.tags.length > 0 || notes.text;
    return html`<div class="notes"><${Tags} tags=${notes.tags} />${notes.text && html`<p class="text">${notes.text}</p>`}
      <button type="button" class="plain edit" onClick=${() => this.setState({ editing: true })}>${any ? "Edit tags and note" : "Add tags or a note"}</button></div>`;
  }
}

// Many events of one kind (a flag that was raised again) are folded after the first few.
const FEW = 4;

export const Top = ({ about, onSee, onNoted }) => {
  const flags = about.events.filter((event) => event.event === "flag");
  const facts = [words(about.task), words(about.label), about.seed == null ? "" : `seed ${words(about.seed)}`, about.started ? `started ${date(about.started)}` : ""];
  const item = (flag, i) => html`<${Flag} key=${i} flag=${flag} id=${about.id} onSee=${onSee} />`;
  return html`<header class="run-top">
    <p class="where"><a href="/runs">All runs</a></p>
    <div class="title-row"><h1>${about.id}</h1><${Badge} status=${about.status} /><span class="said" role="status">${about.said}</span></div>
    <p class="facts">${facts.filter(Boolean).join(" · ")}</p>
    ${about.going_on && html`<p class="going-on">${about.going_on.words}${about.going_on.command && html` <code>${about.going_on.command}</code>`}</p>`}
    ${about.problems.length > 0 && html`<ul class="problems" aria-label="Problems">${about.problems.map((text) => html`<li key=${text}><i aria-hidden="true">!</i> ${text}</li>`)}</ul>`}
    ${flags.length > 0 && html`<section aria-label="Flags"><h2>${count(flags.length, "flag")} <span>evidence to look at, no verdict</span></h2>
      <ul class="flags">${flags.slice(0, FEW).map(item)}</ul>
      ${flags.length > FEW && html`<details><summary>${count(flags.length - FEW, "more flag")}</summary><ul class="flags">${flags.slice(FEW).map(item)}</ul></details>`}</section>`}
    ${about.words.length > 0 && html`<div class="result">${about.words.map((text) => html`<p key=${text}>${words(text)}</p>`)}</div>`}
    <${Notes} about=${about} onNoted=${onNoted} />
  </header>`;
};

// Settings within settings, as task.name, task.length, …
function flat(value, name = "", found = []) {
  const inner = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : null;
  if (!inner || (name && inner.length === 0)) found.push([name, inner ? "{}" : typeof value === "string" ? value : JSON.stringify(value)]);
  else for (const [key, one] of inner) flat(one, name ? `${name}.${key}` : key, found);
  return found;
}

const Pairs = ({ of }) => html`<dl class="pairs">${flat(of).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

const Fold = ({ title, note, open, children }) => html`<details class="fold" open=${open}><summary>${title} <span>${note}</span></summary>${children}</details>`;

const notFlag = (event) => event.event !== "flag"; // flags stand above the charts

const History = ({ about }) => {
  const rest = about.events.filter(notFlag);
  return html`<ul class="history">
    ${about.history.map((entry) => html`<li><b>${said(entry.event)}</b> ${words(entry.time)} <span class="note">${flat({ ...entry, event: undefined, time: undefined }).filter(([, v]) => v !== undefined).map(([k, v]) => `${k} ${v}`).join(", ")}</span></li>`)}
    ${rest.map((event) => html`<li><b>${said(event.name ?? event.event)}</b> step ${num(event.step)} <span class="note">${words(event.text)}</span></li>`)}
  </ul>`;
};

export const Below = ({ about }) => {
  const some = (thing) => thing && Object.keys(thing).length > 0;
  return html`<section class="below" aria-label="About this run">
    ${about.objective && html`<h2>What it maximizes</h2><p class="objective">${words(about.objective)}</p>${about.formula && html`<pre class="formula" tabindex="0">${words(about.formula)}</pre>`}`}
    <h2>About this run</h2>
    ${some(about.config) && html`<${Fold} title="Config" note=${count(flat(about.config).length, "setting")}><${Pairs} of=${about.config} /><//>`}
    ${some(about.versions) && html`<${Fold} title="Versions" note=${flat(about.versions).slice(0, 3).map(([k, v]) => `${k} ${v}`).join(", ")}><${Pairs} of=${about.versions} /><//>`}
    ${some(about.machine) && html`<${Fold} title="System" note=${flat(about.machine).slice(0, 3).map(([k, v]) => `${k} ${v}`).join(", ")}><${Pairs} of=${about.machine} /><//>`}
    <${Fold} title="History" note=${count(about.history.length + about.events.filter(notFlag).length, "event")}><${History} about=${about} /><//>
  </section>`;
};
