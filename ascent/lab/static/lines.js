// Curves over steps, by uPlot: fixed axes, a label at the end of each line, one cursor over all charts.
import { Component } from "./vendor/preact.mjs";
import uPlot from "./vendor/uplot.mjs";
import { html } from "./store.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// light-dark() is resolved on an element that is painted with it, not in the variable itself.
function colour(name) {
  const probe = document.getElementById("probe") ?? document.body.appendChild(Object.assign(document.createElement("i"), { id: "probe", hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color || css(name);
}

const FONT = "12px Inter, system-ui, sans-serif";

function labels(series) {
  return (u) => {
    const shown = series
      .map((s, i) => {
        const values = u.data[i + 1];
        let at = values.length - 1;
        while (at >= 0 && values[at] == null) at -= 1;
        return at < 0 ? null : { text: s.label, colour: colour(s.colour), y: u.valToPos(values[at], "y", true) };
      })
      .filter(Boolean)
      .sort((a, b) => a.y - b.y);
    const gap = 15 * devicePixelRatio;
    const top = u.bbox.top + 6 * devicePixelRatio;
    const bottom = u.bbox.top + u.bbox.height - 2 * devicePixelRatio;
    shown.forEach((s, i) => (s.y = Math.max(s.y, i ? shown[i - 1].y + gap : top)));
    for (let i = shown.length - 1; i >= 0; i -= 1) {
      shown[i].y = Math.min(shown[i].y, i + 1 < shown.length ? shown[i + 1].y - gap : bottom);
    }
    u.ctx.save();
    u.ctx.font = `600 ${12 * devicePixelRatio}px Inter, system-ui, sans-serif`;
    u.ctx.textBaseline = "middle";
    u.ctx.textAlign = "left";
    for (const s of shown) {
      u.ctx.fillStyle = s.colour;
      u.ctx.fillText(s.text, u.bbox.left + u.bbox.width + 7 * devicePixelRatio, s.y);
    }
    u.ctx.restore();
  };
}

export class Lines extends Component {
  options() {
    const { width, height, series, x, y, room = 66 } = this.props;
    const axis = { stroke: () => colour("--quiet"), font: FONT, grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
    return {
      width, height,
      padding: [8, room, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: () => this.props.x }, y: { range: () => this.props.y } },
      axes: [
        { ...axis, size: 26, space: 60 },
        { ...axis, size: 40, splits: () => [this.props.y[0], (this.props.y[0] + this.props.y[1]) / 2, this.props.y[1]], values: (_, v) => v.map((n) => String(+n.toPrecision(3)).replace("-", "−")) },
      ],
      series: [{}, ...series.map((s) => ({ stroke: () => colour(s.colour), width: s.dash ? 1.8 : 2.4, dash: s.dash, points: { show: false }, spanGaps: true }))],
      hooks: { draw: [labels(series)] },
    };
  }

  componentDidMount() {
    this.plot = new uPlot(this.options(), this.props.data, this.place);
    this.themed = () => this.plot.redraw(false, true);
    document.addEventListener("themed", this.themed);
    document.fonts?.ready.then(this.themed);
  }

  componentDidUpdate(before) {
    if (before.width !== this.props.width || before.height !== this.props.height) {
      this.plot.setSize({ width: this.props.width, height: this.props.height });
    }
    this.plot.setData(this.props.data);
  }

  componentWillUnmount() {
    document.removeEventListener("themed", this.themed);
    this.plot.destroy();
  }

  render() {
    return html`<figure class="lines" data-chart=${this.props.name}>
      <figcaption>${this.props.title}${this.props.note && html` <span>${this.props.note}</span>`}</figcaption>
      <div role="img" aria-label=${this.props.label} ref=${(element) => (this.place = element)}></div>
    </figure>`;
  }
}
