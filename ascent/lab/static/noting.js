// Editing a run's note and tags. What is typed is kept until it is saved or given up, whatever happens around it.
import { attempt, Component, get, html, post } from "./shared.js";

const drafts = new Map(); // id: {text, tags}, of editors that were closed by something else than their own buttons
const split = (tags) => tags.split(",").map((tag) => tag.trim()).filter(Boolean);

/* Props: id, notes ({text, tags, revision}; asked for where it is not given), onDone(saved or undefined). */
export class Noting extends Component {
  componentDidMount() {
    attempt(this, async () => {
      const notes = this.props.notes ?? (await get("/api/view/run", { id: this.props.id })).notes;
      this.setState({ text: notes.text, tags: notes.tags.join(", "), revision: notes.revision, ...drafts.get(this.props.id), loaded: true });
      this.field?.focus();
    });
  }

  typed(changes) {
    const { text, tags } = { ...this.state, ...changes };
    drafts.set(this.props.id, { text, tags });
    this.setState(changes);
  }

  async save(revision = this.state.revision) {
    this.setState({ busy: true, error: "", theirs: null });
    const { id } = this.props;
    try {
      const saved = await post("/api/view/notes", { id, text: this.state.text, tags: split(this.state.tags), revision });
      drafts.delete(id);
      this.props.onDone({ text: this.state.text, tags: split(this.state.tags), ...saved });
    } catch (error) {
      const now = (await get("/api/view/run", { id }).catch(() => null))?.notes;
      this.setState({ busy: false, error: error.message, theirs: now && now.revision !== revision ? now : null });
    }
  }

  both() {
    const { text, tags, theirs } = this.state;
    this.typed({ text: [theirs.text, text].filter(Boolean).join("\n"), tags: [...new Set([...theirs.tags, ...split(tags)])].join(", "), theirs: null, error: "", revision: theirs.revision });
  }

  key(event) {
    if (event.key === "Escape") this.give();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.save();
  }

  give() {
    drafts.delete(this.props.id);
    this.props.onDone();
  }

  render({ id }, { text, tags, error, theirs, busy, loaded }) {
    return html`<form class="noting" aria-label=${`Tags and note of ${id}`} onSubmit=${(e) => (e.preventDefault(), this.save())} onKeyDown=${(e) => this.key(e)}>
      ${error && html`<div class="error" role="alert"><p>${error}</p>
        ${theirs && html`<p><button type="button" onClick=${() => this.both()}>Put both together</button> <button type="button" onClick=${() => this.save(theirs.revision)}>Write mine over it</button></p>`}</div>`}
      ${loaded && html`<label>Tags, with commas between<input class="tag-field" ref=${(e) => (this.field = e)} value=${tags} onInput=${(e) => this.typed({ tags: e.target.value })} /></label>
        <label>Note<textarea rows="3" value=${text} onInput=${(e) => this.typed({ text: e.target.value })}></textarea></label>`}
      <p><button type="submit" class="main" disabled=${busy || !loaded}>Save</button> <button type="button" onClick=${() => this.give()}>Cancel</button>
        <span class="note">kept beside the run, in notes.json</span></p>
    </form>`;
  }
}
