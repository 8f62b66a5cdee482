// The settings dialog. Empty fields leave the choice to the server.
import {DEFAULTS, saveSettings, settings} from "/store.js";

const FIELDS = [
  {name: "system", label: "System prompt", type: "textarea", full: true},
  {name: "temperature", label: "Temperature", type: "number", min: 0, max: 2, step: 0.05, about: "0: always the most likely token"},
  {name: "top_p", label: "Top p", type: "number", min: 0, max: 1, step: 0.01},
  {name: "min_p", label: "Min p", type: "number", min: 0, max: 1, step: 0.01},
  {name: "top_k", label: "Top k", type: "number", min: 0, step: 1},
  {name: "repetition_penalty", label: "Repetition penalty", type: "number", min: 0.1, max: 2, step: 0.05},
  {name: "max_tokens", label: "Longest answer", type: "number", min: 1, step: 1, about: "tokens"},
  {name: "seed", label: "Seed", type: "number", step: 1},
  {name: "priority", label: "Class", type: "select", options: [["P0", "P0, interactive"], ["P1", "P1, batch"], ["P2", "P2, best effort"]]},
  {name: "thinking", label: "Thinking", type: "select", options: [["default", "As the model does"], ["on", "On"], ["off", "Off"]], about: "for models whose template has the switch"},
  {name: "key", label: "API key", type: "password", full: true, about: "kept in this browser, sent with each request"},
];

function control(field) {
  const e = document.createElement(field.type === "textarea" ? "textarea" : field.type === "select" ? "select" : "input");
  if (field.type === "select") {
    for (const [value, text] of field.options) e.append(new Option(text, value));
  } else if (field.type === "textarea") {
    e.rows = 3;
  } else {
    e.type = field.type;
    for (const name of ["min", "max", "step"]) if (field[name] !== undefined) e[name] = field[name];
    if (field.type === "password") e.autocomplete = "off";
  }
  e.name = field.name;
  e.value = settings[field.name];
  e.addEventListener("input", () => {
    if (!e.checkValidity()) return;
    settings[field.name] = e.value;
    saveSettings();
  });
  return e;
}

function draw(box) {
  box.replaceChildren(...FIELDS.map((field) => {
    const label = document.createElement("label");
    if (field.full) label.className = "full";
    label.append(field.label, control(field));
    if (field.about) {
      const about = document.createElement("span");
      about.className = "about";
      about.textContent = field.about;
      label.append(about);
    }
    return label;
  }));
}

export function startSettings() {
  const dialog = document.getElementById("settings"), box = document.getElementById("settings-fields");
  document.getElementById("settings-button").addEventListener("click", () => { draw(box); dialog.showModal(); });
  document.getElementById("settings-reset").addEventListener("click", () => {
    Object.assign(settings, DEFAULTS, {theme: settings.theme, key: settings.key});
    saveSettings();
    draw(box);
  });
}
