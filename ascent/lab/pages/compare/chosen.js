// What a comparison is made of: the groups with their runs, and the charts that are shown.
import { Swatch } from "../../chart.js";
import { attempt, Badge, Component, count, Failure, get, html, runLink, shortOf } from "../../shared.js";

const MOST = 50;

// The groups with their runs; each can be taken away, others added.
export class Chosen extends Component {
  async componentDidUpdate(before) {
    if (!this.props.adding || before.adding) return;
    await attempt(this, async () => this.setState({ rows: (await get("/api/view/runs")).runs, error: "" }));
    document.getElementById("add-run")?.focus();
  }

  add(value) {
    const { ids, onIds } = this.props;
    if (this.state.rows.some((row) => row.id === value) && !ids.includes(value)) onIds([...ids, value]);
  }

  render({ ids, found, marked, adding, onAdd, onIds }, { rows, error }) {
    const groups = found ? found.groups.map((g) => ({ ...g, ids: g.ids.filter((id) => ids.includes(id)) })) : [];
    const numbered = groups.some((g) => g.short !== g.name);
    const free = (rows ?? []).filter((row) => !ids.includes(row.id));
    return html`<ul class="chosen" aria-label="Runs">
      ${groups.filter((g) => g.ids.length).map((g, i) => html`<li key=${g.name}>
        <${Swatch} colour=${i} marked=${marked} /><b>${numbered && `${i + 1}: `}${g.title}</b>
        <span class="members">${g.ids.map((id) => html`<span key=${id} class="member"><a href=${runLink(id)} title=${`${id}: ${found.runs[id]?.said}`}>${shortOf(id)}</a> <${Badge} status=${found.runs[id]?.status} said=${found.runs[id]?.said} /><button type="button" class="plain" aria-label=${`Take ${id} away`} onClick=${() => onIds(ids.filter((other) => other !== id))}>×</button></span>`)}</span>
      </li>`)}
      ${ids.length < MOST && html`<li class="adding"><button type="button" aria-expanded=${String(adding)} onClick=${onAdd}>${adding ? "Done" : "Add a run"}</button>
        ${adding && html`<input id="add-run" list="other-runs" placeholder=${rows ? `one of ${count(free.length, "other run")}` : "…"} aria-label="Add a run" onChange=${(e) => this.add(e.target.value)} />
          <datalist id="other-runs">${free.slice(0, 500).map((row) => html`<option key=${row.id} value=${row.id}>${[row.task, row.label, row.status].filter(Boolean).join(", ")}</option>`)}</datalist>`}
        <${Failure} text=${error} /></li>`}
    </ul>`;
  }
}

// Which metrics are drawn: the charts in their order, each with its series.
export const Chips = ({ charts, shown, onToggle }) => html`<details class="fold chips">
  <summary>Charts <span>${shown.length} of ${charts.reduce((n, chart) => n + chart.series.length, 0)}</span></summary>
  <div>${charts.map((chart) => html`<span class="choice" role="group" aria-label=${chart.title} key=${chart.key}>
    ${chart.series.length > 1 && html`<span>${chart.title}</span>`}
    ${chart.series.map((s) => html`<button type="button" key=${s.metric} aria-pressed=${String(shown.includes(s.metric))} onClick=${() => onToggle(s.metric)}>${chart.series.length > 1 ? s.label : chart.title}</button>`)}</span>`)}</div>
</details>`;
