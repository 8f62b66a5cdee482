// Conversations and settings, kept in this browser's localStorage.
//
// A conversation: {id, title, created, updated, messages: [{role, content, reasoning?, error?, figures?}]}.

const INDEX = "cachalot.conversations", SETTINGS = "cachalot.settings";
const listeners = new Set();

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;  // full, or forbidden: the page goes on without a memory
  }
}

const conversations = new Map(read(INDEX, []).map((c) => [c.id, c]));

function save() {
  while (!write(INDEX, [...conversations.values()]) && conversations.size > 1) {
    const oldest = [...conversations.values()].sort((a, b) => a.updated - b.updated)[0];
    conversations.delete(oldest.id);
  }
  for (const listener of listeners) listener();
}

export const store = {
  onChange(listener) { listeners.add(listener); },
  all() { return [...conversations.values()].sort((a, b) => b.updated - a.updated); },
  get(id) { return conversations.get(id); },
  create() {
    const now = Date.now();
    return {id: `${now.toString(36)}-${Math.random().toString(36).slice(2, 8)}`, title: "New conversation", created: now, updated: now, messages: []};
  },
  put(conversation) {
    conversation.updated = Date.now();
    const first = conversation.messages.find((m) => m.role === "user");
    if (first) conversation.title = first.content.trim().replace(/\s+/g, " ").slice(0, 60) || "New conversation";
    conversations.set(conversation.id, conversation);
    save();
  },
  remove(id) { conversations.delete(id); save(); },
  clear() { conversations.clear(); save(); },
};

export const DEFAULTS = {
  system: "", temperature: "", top_p: "", min_p: "", top_k: "", max_tokens: "", seed: "", repetition_penalty: "", priority: "P0", thinking: "default", key: "", theme: "system",
};
export const settings = {...DEFAULTS, ...read(SETTINGS, {})};
export function saveSettings() { write(SETTINGS, settings); }
