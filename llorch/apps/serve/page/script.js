"use strict";
// Chats over /v1/chat/completions. Whatever a model or a user wrote becomes text, never markup.

const TOP = 8; // alternatives of a token
const STORE = "llorch"; // key of sessionStorage: a reload keeps the conversation, the end of the tab deletes it
const FIELDS = ["temperature", "top_p", "seed", "max_tokens", "system", "text"]; // kept as well; the API key is not
const byId = (id) => document.getElementById(id);
const HINT = document.querySelector("#token .hint");
const newChat = () => ({ turns: [], running: null }); // `running` stops an answer
let chat = newChat(); // the one that is shown

function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

async function ask(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached; start it, then send again.");
  });
  if (!response.ok) {
    const said = await response.json().catch(() => null);
    throw new Error(said?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

const contentOf = (tokens) => tokens.map((token) => token.text).join("");
const isAnswered = (turn) => turn.tokens.length > 0 || turn.finish !== null;

// Messages as the API takes them, up to the question of a turn.
function messagesOf(turns, turn) {
  const before = turns.slice(0, turns.indexOf(turn)).filter(isAnswered).flatMap(({ text, tokens }) => [
    { role: "user", content: text }, { role: "assistant", content: contentOf(tokens) },
  ]);
  const system = turn.system ? [{ role: "system", content: turn.system }] : [];
  return [...system, ...before, { role: "user", content: turn.text }];
}

function requestOf(turn, messages) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return {
    model: turn.model, messages,
    temperature: number("temperature"), top_p: number("top_p"), seed: number("seed"), max_tokens: number("max_tokens"),
    stream: true, logprobs: true, top_logprobs: TOP,
  };
}

function addMessage(role, text) {
  const article = made("article", "", role);
  const body = made("p", text);
  article.append(made("h2", role === "user" ? "You" : "Model"), body);
  byId("talk").append(article);
  return { article, body };
}

const views = new WeakMap(); // the elements of a turn

function drawTurn(turn) {
  const view = { question: addMessage("user", turn.text), answer: addMessage("assistant", ""), spans: [] };
  view.answer.body.setAttribute("role", "group");
  view.answer.body.setAttribute("aria-label", "Answer; arrow keys go from token to token, Enter chooses one");
  views.set(turn, view);
  turn.tokens.forEach((_, place) => drawToken(turn, place));
}

// A note or an error stands in its turn; without an answer, at the question.
function drawNotice(turn) {
  const { question, answer } = views.get(turn);
  if (!isAnswered(turn)) answer.article.remove();
  if (!turn.error && !turn.note) return;
  const notice = made("p", turn.error || turn.note, turn.error ? "error" : "note");
  notice.setAttribute("role", turn.error ? "alert" : "status");
  (isAnswered(turn) ? answer : question).article.append(notice);
}

async function send(text) {
  const here = chat; // "New chat" may show another one before the answer ends
  for (const turn of here.turns) if (!isAnswered(turn)) views.get(turn).question.article.remove();
  const turn = { text, model: byId("model").value, system: byId("system").value.trim(), tokens: [], finish: null };
  here.turns = [...here.turns.filter(isAnswered), turn];
  drawTurn(turn);
  showEnd(true);
  here.running = new AbortController();
  busy(true);
  const error = await readAnswer(turn, messagesOf(here.turns, turn), here.running.signal);
  here.running = null;
  if (here !== chat) return;
  if (error && error.name !== "AbortError") turn.error = error.message;
  else if (error) turn.note = "Stopped.";
  else if (turn.finish === "length") turn.note = "The answer stopped at max tokens or at the end of the context.";
  if (!isAnswered(turn)) giveBack(text);
  drawNotice(turn);
  showEnd();
  busy(false);
  save();
}

// Returns the error, if there is one.
async function readAnswer(turn, messages, signal) {
  try {
    for await (const event of events(await ask("v1/chat/completions", requestOf(turn, messages), signal))) {
      const choice = event.choices[0];
      if (!choice) continue;
      turn.finish = choice.finish_reason ?? turn.finish;
      const entry = choice.logprobs?.content?.[0];
      if (!entry && !choice.delta.content) continue;
      turn.tokens.push({ text: choice.delta.content ?? "", entry });
      drawToken(turn, turn.tokens.length - 1);
      showEnd();
    }
    return turn.finish ? null : new Error("The answer is incomplete: the connection was closed.");
  } catch (error) {
    return error;
  }
}

// A question without an answer is no part of the conversation: its text returns to the box, before newer text.
function giveBack(text) {
  const box = byId("text");
  box.value = box.value ? `${text}\n${box.value}` : text;
}

let followsEnd = true; // until the reader scrolls up
let lastTop = 0;

function noticeScroll() {
  const { scrollTop, scrollHeight, clientHeight } = byId("talk");
  if (scrollHeight - scrollTop - clientHeight < 8) followsEnd = true;
  else if (scrollTop < lastTop) followsEnd = false;
  lastTop = scrollTop;
}

function showEnd(always = false) {
  noticeScroll();
  followsEnd ||= always;
  if (followsEnd) byId("talk").scrollTop = byId("talk").scrollHeight;
  noticeScroll();
}

function drawToken(turn, place) {
  const { text } = turn.tokens[place];
  const { spans, answer } = views.get(turn);
  const span = made("span", text, text ? "token" : "token partial");
  span.setAttribute("role", "button");
  span.tabIndex = place ? -1 : 0; // one stop of Tab for an answer
  span.addEventListener("click", () => chooseToken(turn, place));
  span.addEventListener("keydown", (event) => {
    const next = spans[place + { ArrowRight: 1, ArrowLeft: -1 }[event.key]];
    if (!next && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    if (next) focusToken(spans, next);
    else chooseToken(turn, place);
  });
  spans.push(span);
  answer.body.append(span);
}

function focusToken(spans, span) {
  for (const other of spans) other.tabIndex = other === span ? 0 : -1;
  span.focus();
}

function chooseToken(turn, place) {
  const { entry } = turn.tokens[place];
  const { spans } = views.get(turn);
  const span = spans[place];
  closeToken();
  span.classList.add("chosen");
  focusToken(spans, span);
  const close = made("button", "Close", "close");
  close.type = "button";
  close.addEventListener("click", closeToken);
  const panel = byId("token");
  panel.replaceChildren(close, made("h2", `Token ${place + 1}: ${entry ? word(entry) : shown(span.textContent)}`));
  if (entry) panel.append(alternatives(entry));
  const button = made("button", "Which stages ran?");
  button.type = "button";
  const stages = made("div", "", "stages");
  button.addEventListener("click", () => showStages(turn, place, stages));
  panel.append(button, stages);
  panel.scrollTop = 0;
  if (chat.running) return;
  followsEnd = false; // the panel may take room of the conversation, and the token stays in view
  span.scrollIntoView({ block: "nearest" });
}

function closeToken() {
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  byId("token").replaceChildren(HINT);
}

const shown = (text) => JSON.stringify(text).slice(1, -1);

// The text of a token; the bytes of a token that ends inside a character.
function word({ bytes }) {
  try {
    return shown(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes)));
  } catch {
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

function alternatives(entry) {
  const table = made("table");
  table.append(made("caption", "Candidate tokens, before temperature and filters"));
  const isTaken = ({ logprob, bytes }) => logprob === entry.logprob && String(bytes) === String(entry.bytes);
  const candidates = entry.top_logprobs.some(isTaken) ? entry.top_logprobs : [...entry.top_logprobs, entry];
  const taken = candidates.find(isTaken);
  for (const one of candidates) {
    const probability = Math.exp(one.logprob);
    const row = made("tr", "", one === taken ? "taken" : "");
    const meter = made("meter");
    meter.value = probability;
    meter.setAttribute("aria-hidden", "true");
    const bar = made("td");
    bar.append(meter);
    row.append(made("td", word(one), "word"), made("td", `${(100 * probability).toFixed(1)} %`, "number"), bar);
    table.append(row);
  }
  return table;
}

async function showStages(turn, place, stages) {
  stages.textContent = "Running the tokens before this token again\u2026";
  const { model } = turn;
  const before = contentOf(turn.tokens.slice(0, place));
  try {
    // the prompt as the server reads it, then what was answered before this token
    let trace = await (await ask("v1/trace", { model, messages: messagesOf(chat.turns, turn) })).json();
    if (before) {
      const { tokens } = await (await ask("tokenize", { content: before, add_special: false })).json();
      trace = await (await ask("v1/trace", { model, tokens: [...trace.tokens, ...tokens] })).json();
    }
    const title = `${trace.stages.length} stages of ${trace.tokens.length} tokens`;
    stages.replaceChildren(made("p", title), ...layers(trace));
    stages.scrollIntoView({ block: "nearest" });
  } catch (error) {
    stages.textContent = error.message;
  }
}

function layers(trace) {
  const groups = new Map();
  for (const stage of trace.stages) {
    const [, layer, name] = /^(?:l(\d+)\.)?(.*)$/.exec(stage.name);
    const group = layer === undefined ? stage.name : `layer ${layer}`;
    groups.set(group, [...(groups.get(group) ?? []), { ...stage, name }]);
  }
  return [...groups].map(([group, found]) => {
    const details = made("details");
    const table = made("table");
    const head = made("tr");
    head.append(...["stage", "shape", "rms"].map((name) => made("th", name)));
    table.append(head);
    for (const stage of found) {
      const row = made("tr");
      const rms = stage.rms === null ? "none" : stage.rms.toPrecision(4);
      row.append(made("td", stage.name), made("td", stage.shape.join(" \u00d7 ")), made("td", rms, "number"));
      table.append(row);
    }
    details.append(made("summary", `${group} (${found.length})`), table);
    return details;
  });
}

function busy(yes) {
  const isFree = [document.body, byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").disabled = yes;
  byId("stop").disabled = !yes;
  // not on a phone, whose keyboard would cover the answer
  if (!yes && isFree && matchMedia("(hover: hover)").matches) byId("text").focus();
}

const valuesOf = (ids) => Object.fromEntries(ids.map((id) => [id, byId(id).value]));

function save() {
  const fields = valuesOf([...FIELDS, "model"]);
  const write = (turns) => sessionStorage.setItem(STORE, JSON.stringify({ turns, fields }));
  try {
    try {
      write(chat.turns);
    } catch {
      // too large: without the alternatives
      write(chat.turns.map((turn) => ({ ...turn, tokens: turn.tokens.map(({ text }) => ({ text })) })));
    }
  } catch {
    // no storage, or no room in it: the conversation ends with the page
  }
}

let lastModel = ""; // that was chosen before a reload

function restore() {
  let stored = null;
  try {
    stored = JSON.parse(sessionStorage.getItem(STORE));
  } catch {
    // no storage
  }
  if (!stored) return;
  lastModel = stored.fields.model;
  for (const id of FIELDS) byId(id).value = stored.fields[id];
  chat.turns = stored.turns;
  for (const turn of chat.turns) {
    drawTurn(turn);
    if (!turn.finish && !turn.note && !turn.error) {
      turn.note = "Stopped, because the page was left.";
      if (!isAnswered(turn)) giveBack(turn.text);
    }
    drawNotice(turn);
  }
  showEnd(true);
}

let about = ""; // a note on the models

function clear() {
  byId("note").textContent = about;
  byId("error").textContent = "";
}

async function readModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    byId("model").replaceChildren(...data.map((one) => made("option", one.id)));
    if (data.some((one) => one.id === lastModel)) byId("model").value = lastModel;
    const plain = data.some((one) => one.chat === "plain");
    about = plain ? "This model has no chat template. It continues your text." : "";
    clear();
  } catch (error) {
    byId("error").textContent = error.message;
  }
}

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!byId("model").value) await readModels(); // the server may have come after the page
  const text = byId("text").value;
  if (chat.running || !text.trim() || !byId("model").value) return;
  byId("text").value = "";
  clear();
  send(text);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") chat.running?.abort(); });
byId("stop").addEventListener("click", () => chat.running?.abort());
byId("new").addEventListener("click", () => {
  const before = chat;
  chat = newChat();
  before.running?.abort();
  byId("talk").replaceChildren();
  closeToken();
  clear();
  busy(false);
  save();
});
byId("talk").addEventListener("scroll", noticeScroll);
new ResizeObserver(() => showEnd()).observe(byId("talk"));
window.addEventListener("pagehide", save);
byId("key").addEventListener("change", readModels);
byId("unlock").addEventListener("submit", (event) => event.preventDefault()); // Enter: the change is read above
restore();
readModels();
