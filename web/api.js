// Talks to the server: models, streamed chat completions, metrics.

export class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(key) {
  const out = {"Content-Type": "application/json"};
  if (key) out.Authorization = `Bearer ${key}`;
  return out;
}

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  try {
    const body = await response.json();
    if (body.error?.message) message = body.error.message;
  } catch { /* not JSON: the status says enough */ }
  return new ApiError(message, response.status, Number(response.headers.get("Retry-After")) || 0);
}

export async function listModels(key) {
  const response = await fetch("/v1/models", {headers: headers(key)});
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data;
}

export async function readMetrics(key) {
  const response = await fetch("/metrics", {headers: headers(key)});
  if (!response.ok) throw await refusal(response);
  return response.text();
}

// Calls onDelta({content, reasoning}) as text arrives; returns {finish, usage}. signal aborts, which also stops the server's work.
export async function streamChat({body, key, signal, onDelta}) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), signal,
    body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}}),
  });
  if (!response.ok) throw await refusal(response);
  const result = {finish: null, usage: null};
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    pending += value;
    let end;
    while ((end = pending.indexOf("\n\n")) >= 0) {
      const event = pending.slice(0, end);
      pending = pending.slice(end + 2);
      // Lines that begin with a colon are comments that keep the connection open.
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? "The answer broke off.", 200, 0);
      if (chunk.usage) result.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      if (choice.finish_reason) result.finish = choice.finish_reason;
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (delta.content || reasoning) onDelta({content: delta.content ?? "", reasoning});
    }
  }
  return result;
}
