// On every page: light and dark, and the list of keys.
import { html, render } from "./shared.js";

const byId = (id) => document.getElementById(id);

// ---- light and dark ----
const dark = matchMedia("(prefers-color-scheme: dark)");
const other = () => ((document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark");
function applyTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  byId("theme").textContent = other() === "light" ? "☀" : "☾";
  byId("theme").setAttribute("aria-label", `Change to ${other()}`);
  document.dispatchEvent(new Event("themed"));
}
byId("theme").addEventListener("click", () => {
  localStorage.setItem("theme", other());
  applyTheme(other());
});
dark.addEventListener("change", () => applyTheme());
applyTheme(localStorage.getItem("theme"));

// ---- keys: a page puts its own into window.lab.about.keys ----
const keys = byId("keys");
function showKeys() {
  const rows = [...(window.lab?.about?.keys ?? []), ["?", "these keys"]];
  render(
    html`<h2 id="keys-title">Keys</h2>
      <dl>${rows.map(([key, what]) => html`<dt>${key}</dt><dd>${what}</dd>`)}</dl>
      <button type="button" onClick=${() => keys.close()}>Close</button>`,
    keys,
  );
  keys.showModal();
}

// Is a key meant for the page, and not for the control that has the focus?
export function forPage(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, textarea, dialog")) return false;
  return !event.target.closest("input") || (event.target.type === "range" && !event.key.startsWith("Arrow"));
}

byId("help").addEventListener("click", showKeys);
addEventListener("keydown", (event) => event.key === "?" && forPage(event) && showKeys());
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
