// Numbers of tokens as colours: into which of a few classes a number falls, and what the classes mean. A class is never
// colour alone: the line below a token is thicker the further out it is, and dashed on the side below the middle.
import { num } from "/static/shared.js";

const signed = (v) => (typeof v === "number" && v > 0 ? `+${num(v)}` : num(v));
const percent = (v) => `${+(100 * v).toPrecision(3)}%`;

// The class of a signed number by the edges of its size: n4 … n1, z, p1 … p4.
function sided(value, size, edges) {
  let at = 0;
  while (at < edges.length && size >= edges[at]) at += 1;
  return at === 0 ? "z" : `${value < 0 ? "n" : "p"}${at}`;
}

function stepped(value, edges) {
  let at = 0;
  while (at < edges.length && value >= edges[at]) at += 1;
  return `q${at}`;
}

const SURE = [0.95, 0.8, 0.5, 0.2, 0.05, 0.01];
const SPREAD = [0.1, 0.5, 1, 1.5, 2, 3];
const MOVED = [0.02, 0.05, 0.1, 0.2];
const SIDES = ["n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4"];
const STEPS = ["q0", "q1", "q2", "q3", "q4", "q5", "q6"];

// 1, 2 or 5 times a power of ten, at least this.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return +([1, 2, 5, 10].find((d) => d * power >= value * 0.999) * power).toPrecision(3);
}

const MARKS = { low: "n4", high: "p4", dual: "n2" };
export const CLIPS = { low: "clipped low ▼", high: "clipped high ▲", dual: "dual clip ◆" };

// `largest` is the largest advantage of the page, so that the colours of one page can be compared.
export function scaleOf(colour, largest) {
  const top = nice(largest);
  const edges = [0.02, 0.25, 0.5, 0.75].map((part) => part * top);
  if (colour === "greedy") return { ...scaleOf("logp", largest), words: `probability of the token, in steps at ${SURE.map(percent).join(", ")}` };
  return {
    advantage: {
      field: "advantage", say: signed, classes: SIDES, ends: [`−${num(top)}`, "0", `+${num(top)}`],
      of: (v) => sided(v, Math.abs(v), edges),
      words: "below 0: dashed line; above 0: solid line",
    },
    logp: {
      field: "logp", say: num, classes: STEPS, ends: ["p > 95%", "", "p < 1%"],
      of: (v) => stepped(-v, SURE.map((p) => -Math.log(p))),
      words: `probability when it was sampled, in steps at ${SURE.map(percent).join(", ")}`,
    },
    entropy: {
      field: "entropy", say: num, classes: STEPS, ends: ["0", "", "over 3 nats"],
      of: (v) => stepped(v, SPREAD),
      words: `in steps at ${SPREAD.join(", ")} nats`,
    },
    ratio: {
      field: "ratio", say: num, classes: SIDES, ends: ["under 0.83", "1", "over 1.2"],
      of: (v) => sided(Math.log(v), Math.abs(Math.log(v)), MOVED.map((m) => Math.log(1 + m))),
      words: "ρ at the last update that saw it, in steps at 2, 5, 10 and 20%; below 1: dashed line",
    },
    clipped: {
      field: "clipped", say: (v) => (v ? CLIPS[v] : "no"), classes: ["n4", "z", "p4"], ends: ["▼ low", "not clipped", "▲ high"],
      of: (v) => MARKS[v] ?? "z", words: "clipped tokens have a frame and a mark",
    },
  }[colour];
}

export const COLOURS = [["advantage", "advantage"], ["logp", "log-prob"], ["entropy", "entropy"], ["ratio", "ratio"], ["clipped", "clipped or not"]];

// The class of a token; "odd": not a finite number; "": nothing is known.
export function classOf(scale, row, i) {
  const values = row[scale.field];
  if (!values) return "";
  const value = values[i];
  if (scale.field === "clipped") return scale.of(value);
  return value == null ? "" : typeof value === "number" ? scale.of(value) : "odd";
}

// Every number of a token, as pairs of a name and a text.
export function numbersOf(row, i) {
  const said = [];
  const add = (name, values, say = num) => {
    if (values) said.push([name, say(values[i])]);
  };
  const p = typeof row.logp?.[i] === "number" ? ` (p ${percent(Math.exp(row.logp[i]))})` : "";
  add("log-prob", row.logp, (v) => num(v) + p);
  add("sampler's", row.logp_sampler);
  add("reference's", row.logp_ref);
  add("entropy", row.entropy);
  add("advantage", row.advantage, signed);
  add("ratio", row.ratio);
  if (row.sequence_ratio != null) said.push(["response's ratio", num(row.sequence_ratio)]);
  add("value", row.value);
  add("clipped", row.clipped, (v) => (v ? CLIPS[v].replace("clipped ", "") : "no"));
  return said;
}
