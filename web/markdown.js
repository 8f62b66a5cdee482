// Markdown to DOM nodes: paragraphs, headings, lists, quotes, tables, fenced code, emphasis, inline code, links.
// Text goes into text nodes only, so that nothing a model writes can become markup; links lead to http, https and mailto alone.

function element(name, className, ...children) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...children);
  return e;
}

const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*([^*]+?)\*\*|__([^_]+?)__|\*([^*\s][^*]*?)\*|(?<![\w])_([^_\s][^_]*?)_(?![\w])|~~([^~]+?)~~|\[([^\]]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/g;

function link(text, address) {
  let url = null;
  try {
    url = new URL(address, location.href);
  } catch { /* no address */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(text);
  const a = element("a", "", text);
  a.href = url.href;
  a.target = "_blank";
  a.rel = "noopener noreferrer nofollow";
  return a;
}

function inline(text) {
  const out = document.createDocumentFragment();
  let last = 0;
  for (const m of text.matchAll(INLINE)) {
    out.append(text.slice(last, m.index));
    if (m[1]) out.append(element("code", "", m[2].trim()));
    else if (m[3] ?? m[4]) out.append(element("strong", "", inline(m[3] ?? m[4])));
    else if (m[5] ?? m[6]) out.append(element("em", "", inline(m[5] ?? m[6])));
    else if (m[7]) out.append(element("s", "", inline(m[7])));
    else if (m[8]) out.append(link(m[8], m[9]));
    else if (m[10]) out.append(link(m[10], m[10]));
    last = m.index + m[0].length;
  }
  out.append(text.slice(last));
  return out;
}

function codeBlock(language, code) {
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.dataset.copy = "code";
  return element("div", "code-block", element("div", "code-head", element("span", "", language || "text"), copy), element("pre", "", element("code", "", code)));
}

const BLANK = /^\s*$/, FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/, HEADING = /^(#{1,6})\s+(.*?)\s*#*\s*$/, RULE = /^\s*([-*_])(\s*\1){2,}\s*$/, QUOTE = /^\s*>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, TABLE_RULE = /^\s*\|?\s*:?-{2,}:?\s*(\|\s*:?-{2,}:?\s*)*\|?\s*$/;

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim().replaceAll("\\|", "|"));
}

function list(lines, at) {
  const first = lines[at].match(ITEM), indent = first[1].length, ordered = /\d/.test(first[2]);
  const out = element(ordered ? "ol" : "ul");
  if (ordered) out.start = parseInt(first[2], 10);
  while (at < lines.length) {
    const m = lines[at].match(ITEM);
    if (!m || m[1].length < indent || /\d/.test(m[2]) !== ordered) break;
    const body = [m[3]];
    for (++at; at < lines.length; ++at) {
      const next = lines[at].match(ITEM);
      if (next && next[1].length <= indent + 1) break;
      if (BLANK.test(lines[at])) {
        const after = lines[at + 1] ?? "";
        if (!/^\s{2,}/.test(after)) break;
      } else if (!/^\s{2,}/.test(lines[at]) && !next) {
        break;
      }
      body.push(lines[at].replace(/^\s{1,4}/, ""));
    }
    const item = element("li");
    if (body.length === 1) item.append(inline(body[0]));
    else item.append(...blocks(body));
    out.append(item);
    while (at + 1 < lines.length && BLANK.test(lines[at]) && ITEM.test(lines[at + 1])) ++at;
  }
  return [out, at];
}

function blocks(lines) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let m;
    if (BLANK.test(line)) {
      ++at;
    } else if ((m = line.match(FENCE))) {
      const code = [];
      for (++at; at < lines.length && !(lines[at].trim().startsWith(m[1]) && lines[at].trim().replaceAll(m[1][0], "") === ""); ++at) code.push(lines[at]);
      ++at;
      out.push(codeBlock(m[2], code.join("\n")));
    } else if ((m = line.match(HEADING))) {
      out.push(element(`h${Math.min(m[1].length, 4)}`, "", inline(m[2])));
      ++at;
    } else if (RULE.test(line)) {
      out.push(element("hr"));
      ++at;
    } else if (QUOTE.test(line)) {
      const quoted = [];
      for (; at < lines.length && QUOTE.test(lines[at]); ++at) quoted.push(lines[at].replace(QUOTE, ""));
      out.push(element("blockquote", "", ...blocks(quoted)));
    } else if (ITEM.test(line)) {
      const [node, next] = list(lines, at);
      out.push(node);
      at = next;
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
      const sides = cells(lines[at + 1]).map((c) => (!c.endsWith(":") ? "" : c.startsWith(":") ? "centre" : "right"));
      const row = (text, name) => element("tr", "", ...cells(text).map((c, i) => element(name, sides[i], inline(c))));
      const head = row(line, "th"), rows = [];
      for (at += 2; at < lines.length && lines[at].includes("|"); ++at) rows.push(row(lines[at], "td"));
      out.push(element("div", "table", element("table", "", element("thead", "", head), element("tbody", "", ...rows))));
    } else {
      const text = [];
      for (; at < lines.length && !BLANK.test(lines[at]) && !FENCE.test(lines[at]) && !HEADING.test(lines[at]) && !(text.length && ITEM.test(lines[at])); ++at) text.push(lines[at]);
      const p = element("p");
      text.forEach((t, i) => { if (i) p.append(element("br")); p.append(inline(t.trimEnd())); });
      out.push(p);
    }
  }
  return out;
}

export function renderMarkdown(text) {
  const out = document.createDocumentFragment();
  out.append(...blocks(text.replaceAll("\r", "").split("\n")));
  return out;
}
