// Start: theme, tabs, the list of conversations, keys for the whole page.
import {listModels} from "/api.js";
import * as chat from "/chat.js";
import {hideDashboard, showDashboard} from "/dashboard.js";
import {startSettings} from "/settings.js";
import {saveSettings, settings, store} from "/store.js";

const $ = (id) => document.getElementById(id);

function applyTheme() {
  if (settings.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  $("theme").setAttribute("aria-label", `Theme: ${settings.theme === "system" ? "follows the system" : settings.theme}`);
}

function nextTheme() {
  const themes = ["system", "light", "dark"];
  settings.theme = themes[(themes.indexOf(settings.theme) + 1) % themes.length];
  saveSettings();
  applyTheme();
}

function closeSidebar() {
  document.body.classList.remove("sidebar-open");
  $("menu").setAttribute("aria-expanded", "false");
}

function drawHistory() {
  $("history").replaceChildren(...store.all().map((c) => {
    const item = document.createElement("li"), open = document.createElement("button"), remove = document.createElement("button");
    item.classList.toggle("current", c.id === chat.currentId());
    open.className = "open";
    open.textContent = c.title;
    open.title = new Date(c.updated).toLocaleString();
    open.addEventListener("click", () => { location.hash = "#chat"; chat.open(c.id); drawHistory(); closeSidebar(); });
    const save = document.createElement("button");
    save.className = "more";
    save.textContent = "⤓";
    save.title = "Export as Markdown";
    save.setAttribute("aria-label", `Export "${c.title}"`);
    save.addEventListener("click", () => download(`${c.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.md`, chat.exportMarkdown(c), "text/markdown"));
    remove.className = "more";
    remove.textContent = "✕";
    remove.title = "Delete";
    remove.setAttribute("aria-label", `Delete "${c.title}"`);
    remove.addEventListener("click", () => {
      if (!confirm(`Delete "${c.title}"?`)) return;
      store.remove(c.id);
      if (c.id === chat.currentId()) chat.startNew();
    });
    item.append(open, save, remove);
    return item;
  }));
}

function download(name, text, type) {
  const a = document.createElement("a");
  a.href = URL.createObjectURL(new Blob([text], {type}));
  a.download = name;
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 10000);
}

function route() {
  const dashboard = location.hash === "#dashboard";
  $("chat").hidden = dashboard;
  $("dashboard").hidden = !dashboard;
  for (const [id, on] of [["tab-chat", !dashboard], ["tab-dashboard", dashboard]]) {
    if (on) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  if (dashboard) showDashboard($("dashboard"));
  else hideDashboard();
}

async function findModel() {
  try {
    const models = await listModels(settings.key);
    if (!models.length) throw new Error("the server has no model");
    chat.setModel(models[0].id);
    $("model-name").textContent = models[0].id;
    document.title = `${models[0].id} · Cachalot`;
    return true;
  } catch (error) {
    $("model-name").textContent = error.status === 401 ? "An API key is needed: see the settings" : error.status === 503 ? "The model is loading…" : error.message;
    return false;
  }
}

async function waitForModel() {
  while (!(await findModel())) await new Promise((done) => setTimeout(done, 3000));
}

applyTheme();
startSettings();
chat.start();
store.onChange(drawHistory);
drawHistory();
route();
waitForModel();

window.addEventListener("hashchange", route);
$("theme").addEventListener("click", nextTheme);
$("new-chat").addEventListener("click", () => { location.hash = "#chat"; chat.startNew(); drawHistory(); closeSidebar(); });
$("export-all").addEventListener("click", () => download("conversations.json", JSON.stringify(store.all(), null, 2), "application/json"));
$("delete-all").addEventListener("click", () => { if (confirm("Delete all conversations in this browser?")) { store.clear(); chat.startNew(); } });
$("menu").addEventListener("click", () => {
  const open = document.body.classList.toggle("sidebar-open");
  $("menu").setAttribute("aria-expanded", open);
  if (open) $("new-chat").focus();
});
$("main").addEventListener("click", closeSidebar);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (chat.isRunning()) chat.stop();
    closeSidebar();
  }
  if (event.altKey && !event.ctrlKey && !event.metaKey) {
    if (event.code === "KeyN") { event.preventDefault(); $("new-chat").click(); }
    if (event.code === "KeyR") { event.preventDefault(); chat.regenerateLast(); }
    if (event.code === "KeyD") { event.preventDefault(); location.hash = location.hash === "#dashboard" ? "#chat" : "#dashboard"; }
    if (event.code === "KeyI") { event.preventDefault(); $("input").focus(); }
  }
});
