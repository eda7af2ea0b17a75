// One run in the list, with its small curve.
import { Noting } from "../../noting.js";
import { ago, Badge, Component, date, get, html, num, percent, runLink, Tags, words } from "../../shared.js";

// ---- small curves: asked for when their row is seen, many at once, and again when the run has grown ----
const MOST = 40; // in one request
const [WIDE, HIGH] = [96, 24];

export class Sparks {
  found = new Map(); // id: {updated, spark}
  rows = new Map(); // of the rows that are seen
  seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.rows.set(target, target.id.slice(6));
      else this.rows.delete(target);
    }
    this.ask();
  }, { rootMargin: "200px" });

  constructor(changed) {
    this.changed = changed;
  }

  keep(known) {
    this.known = known;
    for (const id of this.found.keys()) if (!known.has(id)) this.found.delete(id);
    this.ask();
  }

  of(row) {
    return this.found.get(row.id)?.spark ?? null;
  }

  async ask() {
    if (this.busy) return;
    const wanted = new Set(this.rows.values());
    const ids = [...wanted].filter((id) => this.known?.has(id) && this.found.get(id)?.updated !== this.known.get(id).row.updated).slice(0, MOST);
    if (!ids.length) return;
    this.busy = true;
    const times = ids.map((id) => this.known.get(id).row.updated);
    const answer = await get("/api/view/spark", { id: ids }).catch(() => null); // one is gone meanwhile: the next look at the list tells
    this.busy = false;
    if (!answer) return;
    ids.forEach((id, i) => this.found.set(id, { updated: times[i], spark: answer[id] ?? null }));
    this.changed();
    this.ask();
  }
}

// A path through the points, and where it ends. A share fills the picture from 0 to 1.
function pathOf({ metric, points }) {
  const [low, high] = /accuracy/.test(metric) ? [0, 1] : [Math.min(...points), Math.max(...points)];
  const x = (i) => ((i / Math.max(1, points.length - 1)) * (WIDE - 4) + 2).toFixed(1);
  const y = (p) => (HIGH - 3 - ((p - low) / (high - low || 1)) * (HIGH - 6)).toFixed(1);
  return { d: `M${points.map((p, i) => `${x(i)} ${y(p)}`).join("L")}`, end: [x(points.length - 1), y(points.at(-1))] };
}

class Spark extends Component {
  componentDidMount() {
    this.props.sparks.seen.observe(this.element);
  }

  componentWillUnmount() {
    this.props.sparks.seen.unobserve(this.element);
    this.props.sparks.rows.delete(this.element);
  }

  render({ row, spark }) {
    const drawn = spark?.points?.length ? pathOf(spark) : null;
    return html`<svg class="spark" ref=${(e) => (this.element = e ?? this.element)} id=${`spark-${row.id}`} width=${WIDE} height=${HIGH} viewBox=${`0 0 ${WIDE} ${HIGH}`} role="img" aria-label=${drawn ? `${spark.metric} over the steps` : "no curve"}>
      ${drawn && html`<title>${spark.metric}</title><line class="zero" x1="0" x2=${WIDE} y1=${HIGH - 2} y2=${HIGH - 2} /><path d=${drawn.d} />
        <circle cx=${drawn.end[0]} cy=${drawn.end[1]} r="2" />`}
    </svg>`;
  }
}

// ---- rows ----
// What a column is called, what it sorts by, and whether the largest comes first.
export const COLUMNS = [
  { key: "id", title: "Run", of: (r) => r.id },
  { key: "status", title: "Status", of: (r) => r.status },
  { key: "step", title: "Steps", of: (r) => r.step, down: true },
  { key: "curve", title: "Curve", small: "accuracy, else reward", of: (r) => r.accuracy ?? r.reward, down: true },
  { key: "accuracy", title: "Right", of: (r) => r.accuracy, down: true },
  { key: "reward", title: "Reward", of: (r) => r.reward, down: true },
  { key: "alerts", title: "Alerts", of: (r) => r.alerts.length, down: true },
  { key: "task", title: "Task", of: (r) => words(r.task) },
  { key: "label", title: "Method", of: (r) => words(r.label) },
  { key: "seed", title: "Seed", of: (r) => r.seed },
  { key: "note", title: "Tags and note", of: (r) => `${r.tags.join(" ")} ${r.note}`.trim() },
  { key: "updated", title: "Changed", of: (r) => r.updated, down: true },
];

const Steps = ({ row }) => html`<span class="of">${num(row.step)}${row.steps != null && html`<span>/${num(row.steps)}</span>`}</span>
  ${row.steps > 0 && row.step < row.steps && html`<progress max=${row.steps} value=${Math.min(row.step, row.steps)} aria-label="Steps done"></progress>`}`;

// A run's name, with the folder that it lies in small above it.
const Name = ({ id }) => {
  const cut = id.lastIndexOf("/") + 1;
  return html`<a href=${runLink(id)}>${cut > 0 && html`<small>${id.slice(0, cut)}</small>`}${id.slice(cut)}</a>`;
};

// A last value, and under it what it was measured on.
const Measured = ({ value, of, text, children }) => html`<span title=${value == null ? "" : `${of}, the last one measured`}>${text}${children}</span>
  ${value != null && html`<small>${of}</small>`}`;

const Noted = ({ row, onTag, onEdit, editing }) => html`<div class="noted">
  <div><${Tags} tags=${row.tags} onPick=${onTag} />${row.note && html`<span class="text" title=${row.note}>${row.note}</span>`}</div>
  <button type="button" class="plain edit" aria-expanded=${editing} aria-label=${`Edit tags and note of ${row.id}`} onClick=${() => onEdit(!editing)}>${row.tags.length || row.note ? "Edit" : "Add"}</button>
</div>`;

const Alerts = ({ alerts }) => alerts.length
  ? html`<span class="alerts" title=${alerts.join(", ")}><i aria-hidden="true">⚑</i> ${alerts.length}<span class="sr">: ${alerts.join(", ")}</span></span>`
  : html`<span class="none" aria-label="none">–</span>`;

export class Row extends Component {
  shouldComponentUpdate(next) {
    const { row, picked, editing, spark, minute, tag } = this.props;
    return next.row !== row || next.picked !== picked || next.editing !== editing || next.spark !== spark || next.minute !== minute || next.tag !== tag;
  }

  render({ row, picked, editing, spark, sparks, onPick, onEdit, onTag }) {
    const cell = (name, content, label) => html`<td role="cell" class=${`c-${name}`} data-label=${label ?? null}>${content}</td>`;
    return html`<tr role="row" data-id=${row.id} class=${picked ? "picked" : ""}>
        <td role="cell" class="c-tick"><input type="checkbox" checked=${picked} aria-label=${`Compare ${row.id}`} onChange=${(e) => onPick(e.target.checked)} /></td>
        ${cell("id", html`<${Name} id=${row.id} />`)}
        ${cell("status", html`<${Badge} status=${row.status} said=${row.said} />${row.status !== "finished" && row.brief && html`<span class="said" title=${row.said}>${row.brief}</span>`}`)}
        ${cell("step", html`<${Steps} row=${row} />`)}
        ${cell("curve", html`<${Spark} row=${row} spark=${spark} sparks=${sparks} />`)}
        ${cell("accuracy", html`<${Measured} value=${row.accuracy} of=${row.accuracy_of} text=${percent(row.accuracy)} />`, "right")}
        ${cell("reward", html`<${Measured} value=${row.reward} of=${row.reward_of} text=${num(row.reward)}>${row.reward != null && row.max_reward != null && html`<span class="most"> of ${num(row.max_reward)}</span>`}<//>`, "reward")}
        ${cell(row.alerts.length ? "alerts" : "alerts no", html`<${Alerts} alerts=${row.alerts} />`)}
        ${cell("task", words(row.task))}
        ${cell("label", html`<span title=${words(row.label)}>${words(row.label)}</span>`)}
        ${cell("seed", row.seed == null ? "–" : words(row.seed), "seed")}
        ${cell(row.tags.length || row.note ? "note" : "note no", html`<${Noted} row=${row} onTag=${onTag} onEdit=${onEdit} editing=${editing} />`)}
        ${cell("updated", html`<time title=${date(row.updated)}>${ago(row.updated)}</time>`)}
      </tr>
      ${editing && html`<tr role="row" class="editing"><td role="cell" colspan=${COLUMNS.length + 1}>
        <${Noting} id=${row.id} onDone=${() => onEdit(false)} /></td></tr>`}`;
  }
}
