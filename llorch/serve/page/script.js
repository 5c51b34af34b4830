"use strict";
// Chats over /v1/chat/completions. Whatever a model or a user wrote becomes text, never markup.

const TOP = 8; // alternatives of a token
const byId = (id) => document.getElementById(id);
const HINT = document.querySelector("#token .hint");
const newChat = () => ({ messages: [], running: null }); // messages as the API takes them; how to stop an answer
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

function asked(messages) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const system = byId("system").value.trim();
  return {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
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

async function send(text) {
  const here = chat; // "New chat" may show another one before the answer ends
  const question = { role: "user", content: text };
  const request = asked([...here.messages, question]);
  const shown = [addMessage("user", text), addMessage("assistant", "")];
  const answer = { request, body: shown[1].body, tokens: [], text: "" };
  answer.body.setAttribute("role", "group");
  answer.body.setAttribute("aria-label", "Answer; arrow keys go from token to token");
  here.running = new AbortController();
  busy(true);
  const { finish, error } = await readAnswer(answer, here.running.signal);
  here.running = null;
  if (here !== chat) return;
  if (answer.tokens.length || finish) here.messages.push(question, { role: "assistant", content: answer.text });
  else giveBack(text, shown);
  if (error?.name === "AbortError") say("Stopped.");
  else if (error) byId("error").textContent = error.message;
  else if (finish === "length") say("The answer stopped at max tokens or at the end of the context.");
  busy(false);
}

async function readAnswer(answer, signal) {
  let finish = null;
  try {
    for await (const event of events(await ask("v1/chat/completions", answer.request, signal))) {
      const choice = event.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const entry = choice.logprobs?.content?.[0];
      if (entry || choice.delta.content) addToken(answer, choice.delta.content ?? "", entry);
    }
    return { finish, error: finish ? null : new Error("The answer is incomplete: the connection was closed.") };
  } catch (error) {
    return { finish, error };
  }
}

// A question without an answer is no part of the conversation: its text returns to the box, before what was typed since.
function giveBack(text, shown) {
  for (const { article } of shown) article.remove();
  const box = byId("text");
  box.value = box.value ? `${text}\n${box.value}` : text;
}

function addToken(answer, text, entry) {
  const place = answer.tokens.length;
  const span = made("span", text || "\u00b7", text ? "token" : "token partial");
  span.setAttribute("role", "button");
  span.tabIndex = place ? -1 : 0; // one stop of Tab for an answer
  answer.tokens.push({ span, entry, before: answer.text });
  answer.text += text;
  const choose = () => chooseToken(answer, place);
  for (const when of ["mouseenter", "focus", "click"]) span.addEventListener(when, choose);
  span.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && answer.tokens[place + step];
    if (!next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.span.tabIndex = 0;
    next.span.focus();
  });
  answer.body.append(span);
}

function chooseToken(answer, place) {
  const { span, entry } = answer.tokens[place];
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  const panel = byId("token");
  panel.replaceChildren(made("h2", `Token ${place + 1}: ${shown(entry?.token ?? span.textContent)}`));
  if (entry) panel.append(alternatives(entry));
  const button = made("button", "Which stages ran?");
  button.type = "button";
  const stages = made("div", "", "stages");
  button.addEventListener("click", () => showStages(answer, place, stages));
  panel.append(button, stages);
}

const shown = (text) => JSON.stringify(text).slice(1, -1);

function alternatives(entry) {
  const table = made("table");
  table.append(made("caption", "Candidate tokens, before temperature and filters"));
  const known = entry.top_logprobs.some((one) => one.logprob === entry.logprob && one.token === entry.token);
  for (const one of known ? entry.top_logprobs : [...entry.top_logprobs, entry]) {
    const probability = Math.exp(one.logprob);
    const row = made("tr", "", one.token === entry.token && one.logprob === entry.logprob ? "taken" : "");
    const meter = made("meter");
    meter.value = probability;
    meter.setAttribute("aria-hidden", "true");
    const bar = made("td");
    bar.append(meter);
    row.append(made("td", shown(one.token), "word"), made("td", `${(100 * probability).toFixed(1)} %`, "number"), bar);
    table.append(row);
  }
  return table;
}

async function showStages(answer, place, stages) {
  stages.textContent = "Running the tokens before this token again\u2026";
  const { model } = answer.request;
  try {
    // the prompt as the server reads it, then what was answered before this token
    let trace = await (await ask("v1/trace", { model, messages: answer.request.messages })).json();
    if (answer.tokens[place].before) {
      const body = { content: answer.tokens[place].before, add_special: false };
      const { tokens } = await (await ask("tokenize", body)).json();
      trace = await (await ask("v1/trace", { model, tokens: [...trace.tokens, ...tokens] })).json();
    }
    stages.replaceChildren(made("p", `${trace.stages.length} stages of ${trace.tokens.length} tokens`), ...layers(trace));
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
  byId("send").disabled = yes;
  byId("stop").disabled = !yes;
  if (!yes) byId("text").focus();
}

let about = ""; // a note on the models, while there is nothing else to say
const say = (text) => { byId("note").textContent = text; };

function clear() {
  say(about);
  byId("error").textContent = "";
}

async function readModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    byId("model").replaceChildren(...data.map((one) => made("option", one.id)));
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
  byId("token").replaceChildren(HINT);
  clear();
  busy(false);
});
byId("key").addEventListener("change", readModels);
byId("unlock").addEventListener("submit", (event) => event.preventDefault()); // Enter: the change is read above
readModels();
