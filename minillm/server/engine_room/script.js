// Polls /engine/state and shows it; sends prompts and shows the answers as they come.
import { CACHED, FREE, LEAVING, SHARED, cellAt, color, drawHistory, drawMap, drawSample, ink } from "./drawing.js";

const POLL = 500; // milliseconds between an answer and the next question
const RETRY = 2000; // milliseconds after a failure
const SLOW = 3000; // milliseconds until the page says that it waits: a state comes when the step that runs has ended
const SPAN = 60; // seconds of history; SHORT at first
const SHORT = 20;
const RATE_OVER = 2; // seconds over which rates are taken
const KEPT = "minillm-api-key";
const $ = (id) => document.getElementById(id);

let key = "", state = null, layout = null, pointed = null, timer = 0, asking = false, stopped = null;
let counts = []; // {at, generated, computed, steps}, oldest first
let history = []; // [at, tokens/s]
try {
  key = sessionStorage.getItem(KEPT) || "";
} catch {
  // storage is off: the key is kept while the page is open
}

const headers = () => (key ? { authorization: "Bearer " + key } : {});
const whole = (number) => Math.round(number).toLocaleString("en");

function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? (1000 * value).toFixed(value < 0.01 ? 1 : 0) + " ms" : value.toFixed(value < 10 ? 2 : 0) + " s";
}

// ---- polling

const paused = () => $("pause").getAttribute("aria-pressed") === "true";

function say(text, kind = "") {
  put("status", text);
  $("status").className = kind;
}

function pollIn(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(poll, milliseconds);
}

async function poll() {
  clearTimeout(timer);
  if (asking || paused() || document.hidden || !$("key-form").hidden) return;
  asking = true;
  const slow = setTimeout(say, SLOW, "waiting for the engine");
  try {
    const answer = await fetch("engine/state", { headers: headers(), cache: "no-store" });
    if (answer.status === 401) return askForKey();
    if (!answer.ok) throw new Error(await problem(answer));
    show(await answer.json());
    if (!paused()) say("live");
    pollIn(POLL);
  } catch (error) {
    say(error instanceof TypeError ? "no answer, trying again" : error.message, "failed");
    pollIn(RETRY);
  } finally {
    clearTimeout(slow);
    asking = false;
  }
}

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "the server answered with status " + answer.status;
  }
}

function askForKey() {
  say("needs a key", "failed");
  put("key-error", key ? "The server did not take this key." : "");
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  try {
    sessionStorage.setItem(KEPT, key);
  } catch {
    // as above
  }
  $("key").value = "";
  $("key-form").hidden = true;
  poll();
});

$("pause").addEventListener("click", () => {
  $("pause").setAttribute("aria-pressed", String(!paused()));
  put("pause", paused() ? "Go on" : "Pause");
  if (paused()) say("paused", "paused");
  else poll();
});
document.addEventListener("visibilitychange", poll);

// ---- what a state looks like

function show(next) {
  state = next;
  put("model", state.model);
  document.title = `${state.running} running · minillm`;
  put("running", whole(state.running));
  put("most", whole(state.max_running));
  put("waiting", whole(state.waiting));
  const { totals, latency } = state;
  for (const [id, times] of [["first", latency.first_token], ["between", latency.between_tokens]])
    for (const percent of [50, 95, 99]) put(`${id}-${percent}`, seconds(times["p" + percent]));
  const queries = totals.prefix_query_tokens;
  put("hits", queries ? Math.round((100 * totals.prefix_hit_tokens) / queries) + "%" : "–");
  put("queries", whole(queries));
  $("drafts").hidden = totals.drafts === undefined;
  if (totals.drafts) { // of all rows of steps that had drafts: how many were right, and what such a row yields
    put("accepted", Math.round((100 * totals.accepted_tokens) / totals.draft_tokens) + "%");
    put("length", (1 + totals.accepted_tokens / totals.drafts).toFixed(1));
  }
  showRates();
  showRows();
  showBlocks();
}

function showRates() {
  const { at, totals } = state;
  const now = { at, generated: totals.generated_tokens, computed: totals.computed_tokens, steps: totals.steps };
  const before = counts[counts.length - 1];
  if (before && (now.at < before.at || now.generated < before.generated)) [counts, history] = [[], []]; // a new server
  const last = counts[counts.length - 1];
  if (!last || now.at !== last.at) counts.push(now);
  while (counts.length > 2 && counts[1].at <= at - RATE_OVER) counts.shift();
  const first = counts[0], passed = now.at - first.at;
  const rate = (name) => (passed > 0 ? (now[name] - first[name]) / passed : 0);
  if (!last || now.at !== last.at) history.push([at, rate("generated")]);
  history = history.filter(([when]) => when > at - SPAN);
  put("rate", whole(rate("generated")));
  put("computed-rate", whole(rate("computed")));
  put("step-rate", whole(rate("steps")));
  drawHistory($("history"), history, span());
}

function span() {
  const whole = history.length ? history[history.length - 1][0] - history[0][0] : 0;
  return Math.min(SPAN, Math.max(SHORT, whole));
}

function lineFor(row) {
  const line = document.createElement("tr");
  for (let i = 0; i < 5; i++) line.append(document.createElement("td"));
  const number = document.createElement("span");
  number.className = "row-number";
  number.textContent = row.row;
  number.style.background = color(row.row);
  number.style.color = ink(row.row);
  line.cells[0].append(number);
  line.cells[1].textContent = row.id;
  const progress = document.createElement("div"), bar = document.createElement("div");
  const ofPrompt = document.createElement("i"), output = document.createElement("i");
  const amount = document.createElement("span");
  progress.className = "progress";
  bar.className = "bar";
  ofPrompt.className = "of-prompt";
  output.style.background = color(row.row);
  amount.className = "amount";
  bar.append(ofPrompt, output);
  progress.append(bar, amount);
  line.cells[3].append(progress);
  line.tabIndex = 0;
  const light = (on) => () => point(on ? row.row : null);
  line.addEventListener("pointerenter", light(true));
  line.addEventListener("pointerleave", light(false));
  line.addEventListener("focus", light(true));
  line.addEventListener("blur", light(false));
  return { line, ofPrompt, output, amount };
}

const lines = new Map(); // the table's, by name
const nameOf = (row) => row.row + " " + row.id;

function showRows() {
  const body = $("rows"), names = new Set(state.rows.map(nameOf));
  for (const [name, { line }] of lines)
    if (!names.has(name)) {
      line.remove();
      lines.delete(name);
    }
  for (const [place, row] of state.rows.entries()) {
    const name = nameOf(row);
    if (!lines.has(name)) lines.set(name, lineFor(row));
    const { line, ofPrompt, output, amount } = lines.get(name);
    if (!line.isConnected) body.insertBefore(line, body.children[place] || null);
    line.className = row.row === pointed ? "lit" : "";
    line.cells[2].textContent = row.phase;
    line.cells[2].className = row.phase;
    line.cells[4].textContent = whole(row.blocks);
    const share = (tokens) => (100 * tokens) / row.limit + "%";
    ofPrompt.style.width = share(Math.min(row.computed, row.prompt));
    output.style.width = share(Math.max(0, row.computed - row.prompt));
    amount.textContent = `${whole(row.computed)} / ${whole(row.limit)}`;
  }
  const hidden = state.running - state.rows.length;
  const empty = "No request runs. Send a prompt, and its rows and blocks appear here.";
  put("rows-text", hidden ? `and ${whole(hidden)} younger ones` : state.running ? "" : empty);
}

function showBlocks() {
  const { blocks } = state, { preemptions } = state.totals;
  const many = ` A cell stands for ${blocks.per_cell} blocks and shows the first row that holds one of them.`;
  const cell = blocks.per_cell > 1 ? many : "", { more } = blocks;
  const others = [["free", more.free], ["cached", more.cached]].filter(([, count]) => count);
  const last = blocks.first + blocks.cells.length - 1;
  const part = others.length
    ? ` The map has blocks ${whole(blocks.first)} to ${whole(last)}: ` +
      others.map(([what, count]) => `${whole(count)} more are ${what}`).join(", ") + "."
    : "";
  const preempted = preemptions ? ` Preemptions so far: ${whole(preemptions)}.` : "";
  const text = `${whole(blocks.total)} blocks of ${blocks.size} tokens: ${whole(blocks.used)} used, ` +
    `${whole(blocks.cached)} cached, ${whole(blocks.free)} free.${cell}${part}${preempted}`;
  put("blocks-text", text);
  $("map").setAttribute("aria-label", "Map of cache blocks. " + text);
  layout = drawMap($("map"), blocks, pointed);
}

function point(row) {
  if (row === pointed) return;
  pointed = row;
  if (state) {
    showRows();
    showBlocks();
  }
}

function named(what) {
  if (what === FREE) return "free";
  if (what === CACHED) return "cached: a prefix that a later prompt may share";
  if (what === SHARED) return "shared by several rows";
  if (what === LEAVING) return "leaving: free once the step in flight has ended";
  const row = state.rows.find((each) => each.row === what);
  return `row ${what}` + (row ? `, ${row.id}` : "");
}

const hint = $("block-hint").textContent;
$("map").addEventListener("pointermove", (event) => {
  const index = state && layout ? cellAt(event, layout, state.blocks.cells.length) : null;
  if (index === null) return;
  const what = state.blocks.cells[index], { per_cell } = state.blocks;
  const first = state.blocks.first + index * per_cell, last = Math.min(first + per_cell, state.blocks.total) - 1;
  put("block-hint", (per_cell > 1 ? `Blocks ${first} to ${last}: ` : `Block ${first}: `) + named(what));
  point(what >= 0 ? what : null);
});
$("map").addEventListener("pointerleave", () => {
  put("block-hint", hint);
  point(null);
});

function drawLegend() {
  const kinds = [[SHARED, "shared"], [CACHED, "cached"], [LEAVING, "leaving"], [FREE, "free"]];
  const entries = [[0, "of a row, with its number"], ...kinds];
  $("legend").replaceChildren(
    ...entries.map(([what, text]) => {
      const entry = document.createElement("span"), sample = document.createElement("canvas");
      drawSample(sample, what);
      entry.append(sample, text);
      return entry;
    }),
  );
}

function redraw() {
  drawLegend();
  if (!state) return;
  drawHistory($("history"), history, span());
  showBlocks();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);

// ---- the prompt box

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function request() {
  const text = $("prompt").value, body = {
    n: Number($("answers").value),
    max_tokens: Number($("tokens").value),
    temperature: Number($("temperature").value),
    ignore_eos: $("endless").checked,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if ($("kind").value === "chat")
    return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: text }] }];
  return ["v1/completions", { ...body, prompt: text }];
}

function showTiming(begun, first, tokens, now, ended) {
  if (first === null) return put("timing", `waiting for the first token: ${seconds((now - begun) / 1000)}`);
  const passed = (now - first.at) / 1000, rate = passed > 0 ? (tokens - first.tokens) / passed : 0;
  const speed = rate > 0 ? `, ${whole(rate)} tokens/s` : "";
  put("timing", `First token after ${seconds((first.at - begun) / 1000)}, ${whole(tokens)} tokens${speed}${ended}`);
}

// Follow the end of the text, unless the reader has scrolled up.
function append(line, piece) {
  const follows = line.scrollHeight - line.scrollTop - line.clientHeight < 8;
  line.append(line.textContent ? piece : piece.trimStart());
  if (follows) line.scrollTop = line.scrollHeight;
}

async function send() {
  if (stopped) return;
  stopped = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const [path, body] = request(), begun = performance.now();
  const answers = Array.from({ length: body.n }, () => document.createElement("li"));
  for (const line of answers) line.tabIndex = 0; // so that keys can scroll it
  $("output").replaceChildren(...answers);
  let first = null, tokens = 0, last = begun, ended = ", done";
  $("timing").setAttribute("aria-live", "off"); // a screen reader says only how it ended
  const clock = setInterval(() => first || showTiming(begun, null, 0, performance.now(), ""), 100);
  try {
    const given = { "content-type": "application/json", ...headers() };
    const post = { method: "POST", headers: given, body: JSON.stringify(body), signal: stopped.signal };
    const answer = await fetch(path, post);
    if (answer.status === 401) askForKey();
    if (!answer.ok) throw new Error(await problem(answer));
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage && event.usage.completion_tokens > tokens) {
        tokens = event.usage.completion_tokens;
        last = performance.now();
        first = first || { at: last, tokens };
        showTiming(begun, first, tokens, last, "");
      }
      for (const choice of event.choices) {
        const piece = choice.delta ? choice.delta.content : choice.text;
        if (piece) append(answers[choice.index], piece);
      }
    }
  } catch (error) {
    ended = error.name === "AbortError" ? ", stopped" : "";
    if (!ended) {
      const line = document.createElement("li");
      line.className = "error";
      line.textContent = error instanceof TypeError ? "The server did not answer." : error.message;
      line.setAttribute("role", "alert");
      $("output").append(line);
    }
  } finally {
    clearInterval(clock);
    $("timing").setAttribute("aria-live", "polite");
    if (first) showTiming(begun, first, tokens, last, ended);
    else put("timing", ended === ", stopped" ? "Stopped before the first token" : "");
    stopped = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    poll();
  }
}

$("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("prompt-form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => stopped && stopped.abort());

drawLegend();
poll();
