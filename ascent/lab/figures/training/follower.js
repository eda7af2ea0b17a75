// A run as the page follows it: its points by server-sent events, its state, its responses.
import { get, inLab } from "../../shared.js";

const PAUSE = 400; // ms between two looks at its responses
const TRIES = 60;

export class Follower {
  points = [];
  texts = [];
  status = { status: "starting", words: "starting: a process is loading the library", step: 0, paused: false };
  responses = null;
  offset = 0; // the byte offset at which the last line ends
  tries = 0;

  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.connect();
  }

  get ended() {
    return ["finished", "interrupted", "failed", "died", "missing"].includes(this.status.status);
  }

  connect() {
    this.source = new EventSource(inLab(`/api/runs/${this.name}/events?after=${this.offset}`));
    this.source.addEventListener("metrics", (event) => this.metrics(event));
    this.source.addEventListener("reset", () => Object.assign(this, { offset: 0, points: [], texts: [] }));
    this.source.addEventListener("status", (event) => {
      this.status = JSON.parse(event.data);
      this.changed();
    });
    this.source.addEventListener("end", () => {
      this.source.close();
      this.look();
    });
    this.source.onerror = () => {
      if (this.source.readyState !== EventSource.CLOSED || this.closed) return;
      this.tries += 1;
      if (this.tries > TRIES) this.status = { ...this.status, status: "missing", words: "the lab has no such run" };
      else setTimeout(() => this.closed || this.connect(), 700);
      this.changed();
    };
  }

  metrics(event) {
    if (+event.lastEventId <= this.offset) return;
    this.offset = +event.lastEventId;
    this.tries = 0;
    const { point, texts, line } = JSON.parse(event.data);
    this.points.push(point);
    this.texts.push(texts);
    this.line = line;
    this.look();
    this.changed();
  }

  // The newest responses, at most a few times a second.
  async look() {
    this.again = true;
    if (this.looking) return;
    this.looking = true;
    while (this.again && !this.closed) {
      this.again = false;
      const found = await get(`/api/runs/${this.name}/responses`).catch(() => null); // the stream says so if the lab is gone
      if (found?.step) this.responses = found;
      this.changed();
      await new Promise((done) => setTimeout(done, PAUSE));
    }
    this.looking = false;
  }

  close() {
    this.closed = true;
    this.source.close();
  }
}
