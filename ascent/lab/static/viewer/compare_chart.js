// A chart of several settings: short names with the whole ones as titles, and no number of a line that has no point in sight.
import { Chart } from "./chart.js";
import { lastOf } from "./curves.js";

export class CompareChart extends Chart {
  render(props) {
    this.grain = props.grain;
    return super.render(props);
  }

  point(step) {
    super.point(step);
    if (!this.list || !this.plot) return;
    const [from, to] = this.span();
    const there = step != null && step >= from && step <= to;
    const places = this.list.querySelectorAll("li");
    this.lines.forEach((line, i) => {
      if (!places[i]) return;
      if (line.full) places[i].title = line.full;
      const last = there ? null : lastOf(line, to);
      const output = places[i].querySelector("output");
      if (last && last.at + line.bucket / 2 < from && output.textContent !== "–") output.textContent = "–";
    });
  }
}
