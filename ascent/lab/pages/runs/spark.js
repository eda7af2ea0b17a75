// Small curves in the list: asked for when their row is seen, many at once, and again when the run has grown.
import { Component, get, html } from "/static/shared.js";

const MOST = 40; // in one request
const [WIDE, HIGH] = [96, 24];

export class Sparks {
  constructor(changed) {
    this.changed = changed;
    this.found = new Map(); // id: {updated, spark}
    this.rows = new Map(); // of the rows that are seen
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.rows.set(target, target.id.slice(6));
        else this.rows.delete(target);
      }
      this.ask();
    }, { rootMargin: "200px" });
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

function pathOf({ metric, points }) {
  const known = points.filter((p) => p != null);
  const share = /accuracy/.test(metric);
  const low = share ? 0 : Math.min(...known);
  const high = share ? 1 : Math.max(...known);
  const x = (i) => ((i / Math.max(1, points.length - 1)) * (WIDE - 4) + 2).toFixed(1);
  const y = (p) => (HIGH - 3 - ((p - low) / (high - low || 1)) * (HIGH - 6)).toFixed(1);
  let d = "";
  points.forEach((p, i) => {
    if (p != null) d += `${i && points[i - 1] != null ? "L" : "M"}${x(i)} ${y(p)}`;
  });
  const last = points.length - 1;
  return { d, end: points[last] == null ? null : [x(last), y(points[last])] };
}

export class Spark extends Component {
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
        ${drawn.end && html`<circle cx=${drawn.end[0]} cy=${drawn.end[1]} r="2" />`}`}
    </svg>`;
  }
}
