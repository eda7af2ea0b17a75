// A run as the page follows it: its points by server-sent events, its state, its responses.
export class Follower {
  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.points = [];
    this.texts = [];
    this.status = { status: "starting", words: "starting: a process is loading the library", step: 0, paused: false };
    this.responses = null;
    this.offset = 0; // the byte offset at which the last line ends
    this.connect();
  }

  get ended() {
    return ["finished", "interrupted", "failed", "died", "missing"].includes(this.status.status);
  }

  connect() {
    this.source = new EventSource(`/api/runs/${this.name}/events?after=${this.offset}`);
    this.source.addEventListener("metrics", (event) => this.metrics(event));
    this.source.addEventListener("reset", () => {
      this.offset = 0;
      this.points = [];
      this.texts = [];
    });
    this.source.addEventListener("status", (event) => {
      this.status = JSON.parse(event.data);
      this.changed();
    });
    this.source.addEventListener("end", () => {
      this.source.close();
      this.look(true);
    });
    this.source.onerror = () => {
      if (this.source.readyState !== EventSource.CLOSED || this.closed) return;
      this.tries = (this.tries ?? 0) + 1;
      if (this.tries > 60) this.status = { ...this.status, status: "missing", words: "the lab has no such run" };
      else setTimeout(() => this.closed || this.connect(), 700);
      this.changed();
    };
  }

  metrics(event) {
    const offset = +event.lastEventId;
    if (offset <= this.offset) return;
    this.offset = offset;
    this.tries = 0;
    const { point, texts, line } = JSON.parse(event.data);
    this.points.push(point);
    this.texts.push(texts);
    this.line = line;
    this.look();
    this.changed();
  }

  // The newest responses, at most a few times a second.
  async look(now = false) {
    if (this.looking || (!now && Date.now() - (this.looked ?? 0) < 400)) {
      this.again = true;
      if (!this.looking && !this.later) this.later = setTimeout(() => ((this.later = null), this.look(true)), 450);
      return;
    }
    this.looking = true;
    this.looked = Date.now();
    try {
      const answer = await fetch(`/api/runs/${this.name}/responses`);
      const found = await answer.json();
      if (!found.error && found.step) this.responses = found;
    } catch {
      // the stream says so if the lab is gone
    }
    this.looking = false;
    this.changed();
    if (this.again) {
      this.again = false;
      this.look(this.ended);
    }
  }

  close() {
    this.closed = true;
    clearTimeout(this.later);
    this.source.close();
  }
}
