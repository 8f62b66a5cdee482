// The conversation: what is shown, sent, streamed, stopped, edited and written again.
import {ApiError, streamChat} from "/api.js";
import {renderMarkdown} from "/markdown.js";
import {settings, store} from "/store.js";

const $ = (id) => document.getElementById(id);
const messagesBox = $("messages"), input = $("input"), send = $("send"), status = $("status"), notice = $("notice");

let conversation = store.create();
let running = null;  // {controller} while an answer streams
let modelId = "";

export function setModel(id) { modelId = id; }
export function currentId() { return conversation.id; }

function button(text, action, label) {
  const b = document.createElement("button");
  b.type = "button";
  b.textContent = text;
  if (label) b.setAttribute("aria-label", label);
  b.addEventListener("click", action);
  return b;
}

function div(className, ...children) {
  const d = document.createElement("div");
  d.className = className;
  d.append(...children);
  return d;
}

function atEnd() { return messagesBox.scrollHeight - messagesBox.scrollTop - messagesBox.clientHeight < 60; }
function toEnd() { messagesBox.scrollTop = messagesBox.scrollHeight; }

function welcome() {
  const h = document.createElement("h1");
  h.textContent = "What shall we dive into?";
  const p = document.createElement("p");
  p.textContent = "Your messages go to this server alone, and are kept in this browser alone.";
  return div("welcome", h, p);
}

function show(message, index) {
  const box = div(`message ${message.role}`);
  box.dataset.index = index;
  fill(box, message, index);
  return box;
}

function fill(box, message, index) {
  const streaming = running?.index === index;
  const who = div("who", message.role === "user" ? "You" : "Answer");
  const body = div("body");
  if (message.role === "user") {
    body.textContent = message.content;
  } else {
    if (message.reasoning) {
      const details = document.createElement("details");
      details.className = "reasoning";
      details.open = box.querySelector("details.reasoning")?.open ?? false;
      const summary = document.createElement("summary");
      summary.textContent = streaming && !message.content ? "Thinking…" : "Reasoning";
      details.append(summary, renderMarkdown(message.reasoning));
      body.append(details);
    }
    body.append(renderMarkdown(message.content));
    if (streaming) (body.lastElementChild ?? body).classList.add("caret");
  }
  box.replaceChildren(who, body);
  if (message.error) box.append(div("error", message.error));
  if (!streaming) box.append(tools(message, index));
}

function tools(message, index) {
  const row = div("tools");
  row.append(button("Copy", (event) => copy(message.content, event.currentTarget)));
  if (message.role === "user") row.append(button("Edit", () => edit(index)));
  if (message.role === "assistant") row.append(button("Regenerate", () => answerFrom(index)));
  if (message.figures) {
    const figures = document.createElement("span");
    figures.className = "figures";
    figures.textContent = message.figures;
    row.append(figures);
  }
  return row;
}

async function copy(text, control) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without a secure context there is no clipboard: the old way
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = control.textContent;
  control.textContent = "Copied";
  setTimeout(() => { control.textContent = before; }, 1200);
}

export function render() {
  messagesBox.replaceChildren(...(conversation.messages.length ? conversation.messages.map(show) : [welcome()]));
  toEnd();
}

function redraw(index) {
  const box = messagesBox.querySelector(`[data-index="${index}"]`);
  if (!box) return;
  const stay = atEnd();
  fill(box, conversation.messages[index], index);
  if (stay) toEnd();
}

export function open(id) {
  stop();
  conversation = store.get(id) ?? store.create();
  notice.hidden = true;
  render();
  input.focus();
}

export function startNew() { open(""); }

function edit(index) {
  if (running) return;
  const box = messagesBox.querySelector(`[data-index="${index}"]`);
  const area = document.createElement("textarea");
  area.className = "edit";
  area.value = conversation.messages[index].content;
  area.setAttribute("aria-label", "Edit the message");
  const accept = () => {
    conversation.messages[index].content = area.value;
    conversation.messages.length = index + 1;
    answerFrom(index + 1);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") render();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) accept();
  });
  box.replaceChildren(area, div("tools", button("Send", accept), button("Cancel", render)));
  area.focus();
}

function requestBody(messages) {
  const body = {model: modelId, messages: []};
  if (settings.system.trim()) body.messages.push({role: "system", content: settings.system});
  for (const m of messages) if (m.content) body.messages.push({role: m.role, content: m.content});
  for (const name of ["temperature", "top_p", "min_p", "repetition_penalty"]) if (settings[name] !== "") body[name] = Number(settings[name]);
  for (const name of ["top_k", "seed"]) if (settings[name] !== "") body[name] = Math.trunc(Number(settings[name]));
  if (settings.max_tokens !== "") body.max_completion_tokens = Math.trunc(Number(settings.max_tokens));
  body.priority = settings.priority;
  if (settings.thinking !== "default") body.chat_template_kwargs = {thinking: settings.thinking === "on", enable_thinking: settings.thinking === "on"};
  return body;
}

function describe(usage, started, first) {
  if (!usage) return "";
  const seconds = (performance.now() - first) / 1000, n = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = n > 1 && seconds > 0 ? ` · ${((n - 1) / seconds).toFixed(n > 100 * seconds ? 0 : 1)} tokens/s` : "";
  return `${n} tokens${speed} · first after ${((first - started) / 1000).toFixed(2)} s · prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`;
}

// Drops what stands at index and behind it, and lets the model write from there.
async function answerFrom(index) {
  if (running) return;
  notice.hidden = true;
  conversation.messages.length = index;
  const message = {role: "assistant", content: "", reasoning: ""};
  conversation.messages.push(message);
  const mine = conversation, controller = new AbortController();
  running = {controller, index};
  setBusy(true);
  render();
  const started = performance.now();
  let first = 0, drawn = 0;
  const draw = () => { drawn = 0; if (mine === conversation) redraw(index); };
  try {
    const result = await streamChat({
      body: requestBody(mine.messages.slice(0, index)), key: settings.key, signal: controller.signal,
      onDelta(delta) {
        first ||= performance.now();
        message.content += delta.content;
        message.reasoning += delta.reasoning;
        drawn ||= requestAnimationFrame(draw);
      },
    });
    message.figures = describe(result.usage, started, first || performance.now());
    if (result.finish === "length") message.figures += " · cut at the limit";
  } catch (error) {
    if (error.name === "AbortError") {
      message.figures = "stopped";
    } else {
      message.error = error instanceof ApiError ? error.message : "The connection to the server broke off.";
      if (error.retryAfter) message.error += ` Try again in ${error.retryAfter} s.`;
      if (error.status === 401) message.error += " A key can be entered in the settings.";
    }
  }
  running = null;
  if (drawn) cancelAnimationFrame(drawn);
  setBusy(false);
  store.put(mine);
  if (mine === conversation) redraw(index);
}

function setBusy(busy) {
  send.textContent = busy ? "Stop" : "Send";
  messagesBox.setAttribute("aria-busy", busy);
  status.textContent = busy ? "Writing… Esc stops." : "Enter sends, Shift Enter starts a new line, Esc stops.";
}

export function stop() { running?.controller.abort(); }
export function isRunning() { return running !== null; }

export function regenerateLast() {
  const last = conversation.messages.length - 1;
  if (!running && last >= 0 && conversation.messages[last].role === "assistant") answerFrom(last);
}

function submit() {
  if (running) return stop();
  const text = input.value.trim();
  if (!text) return;
  conversation.messages.push({role: "user", content: text});
  store.put(conversation);
  input.value = "";
  grow();
  answerFrom(conversation.messages.length);
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

export function exportMarkdown(c) {
  return `# ${c.title}\n\n` + c.messages.map((m) => `**${m.role === "user" ? "You" : "Answer"}**\n\n${m.content}\n`).join("\n");
}

export function start() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) submit();
    }
  });
  messagesBox.addEventListener("click", (event) => {
    const control = event.target.closest("button[data-copy]");
    if (control) copy(control.closest(".code-block").querySelector("code").textContent, control);
  });
  render();
}
