/**
 * The page to try the server: a conversation, the plan of each answer and why, streaming, stopping.
 *
 * The conversation and an API key that is typed in are kept in this module only. What the server
 * sends becomes text, never markup.
 */

import { byId, element, say } from "./elements.js";
import { count, speed, time } from "./numbers.js";

const WAIT = 1000;
/** Candidates of the router that are shown; the others are counted. */
const LISTED = 5;

/** Requests to the server, with the key if there is one. */
class Client {
  key = null;

  async get(path) {
    return checked(await fetch(path, this.#options({})));
  }

  async post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const sent = { method: "POST", headers, body: JSON.stringify(body), signal };
    return checked(await fetch(path, this.#options(sent)));
  }

  #options({ headers = {}, ...rest }) {
    const key = this.key === null ? {} : { Authorization: `Bearer ${this.key}` };
    return { ...rest, headers: { ...headers, ...key }, cache: "no-store", credentials: "omit" };
  }
}

/** An answer that is an error: its status, the words of the server, and a way out. */
class Refusal extends Error {
  constructor(status, { message, hint, code }, retryAfter) {
    super(message);
    this.status = status;
    this.hint = hint || hintFor(status, code, retryAfter);
  }
}

async function checked(response) {
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: {} }));
  const facts = { message: `the server answered ${response.status}`, ...error };
  throw new Refusal(response.status, facts, response.headers.get("Retry-After"));
}

/** What to do about an error of OpenAI's API, which has no hints. */
function hintFor(status, code, retryAfter) {
  if (code === "context_length_exceeded") return "begin a new conversation, or write less";
  if (status === 401) return "enter a key that the server knows";
  if (status === 429) return `send it again in ${retryAfter ?? "a few"} seconds`;
  if (status === 503) return "send it again in a moment";
  return "";
}

/** The data of server-sent events, one after the other. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

/** Who is to answer: the router, the base, or named experts. */
class Choice {
  #base = "";
  #named = [];

  constructor() {
    byId("choice").addEventListener("change", (event) => this.#changed(event.target));
    byId("choice").addEventListener("submit", (event) => event.preventDefault());
    byId("who").open = matchMedia("(min-width: 48rem)").matches;
  }

  /** Offer a base, and the experts that fit it. */
  offer({ base, experts }) {
    [this.#base, this.#named] = [base, []];
    say(byId("base-name"), base);
    const usable = experts.filter(({ fits, revoked }) => fits && !revoked);
    byId("experts-list").replaceChildren(
      ...(usable.length ? usable.map(expertBox) : [element("p", { class: "soft" }, "No installed expert fits this base.")]),
    );
  }

  /** The name of the model for a completion. */
  get model() {
    if (this.who === "base") return this.#base;
    return this.who === "named" ? this.#named.join("+") : "auto";
  }

  /** The fields of a request for a plan; null if there is nothing to plan. */
  get planFields() {
    if (this.who === "base") return null;
    return this.who === "named" ? { force_experts: this.#named } : {};
  }

  get who() {
    return byId("choice").elements.who.value;
  }

  /** What is missing before a message can be sent; empty if nothing is. */
  get problem() {
    return this.who === "named" && this.#named.length === 0 ? "Choose at least one expert, or let the router choose." : "";
  }

  #changed(field) {
    if (field.name === "expert") {
      this.#named = this.#named.filter((ref) => ref !== field.value);
      if (field.checked) this.#named.push(field.value);
    }
    byId("experts").hidden = this.who !== "named";
    const words = { auto: "automatic", base: "the base alone", named: this.#named.join(" + ") || "experts" };
    say(byId("chosen"), words[this.who]);
  }
}

function expertBox({ ref, description }) {
  const box = element("input", { type: "checkbox", name: "expert", value: ref });
  return element("label", {}, box, " ", element("span", {}, ref, " ", element("small", {}, description)));
}

/** One answer in the conversation: its plan, its text as it comes, and figures at its end. */
class Answer {
  #text = element("p", { class: "text" });
  #reasoning = element("details", { class: "plan" }, element("summary", {}, "Reasoning"), element("p", { class: "text" }));
  #plan = element("details", { class: "plan" });
  #figures = element("p", { class: "soft figures" });
  text = "";

  constructor() {
    this.#plan.hidden = this.#reasoning.hidden = true;
    const parts = [this.#plan, this.#reasoning, this.#text, this.#figures];
    this.node = element("article", { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" }, ...parts);
  }

  /** Append what came, of the answer and of the reasoning before it. */
  write({ content, reasoning_content: reasoning }) {
    if (content) this.#text.append(content);
    this.text += content ?? "";
    if (!reasoning) return;
    this.#reasoning.hidden = false;
    this.#reasoning.lastChild.append(reasoning);
  }

  /** Show which experts answer, and why they and no others. */
  explain({ plan, candidates = [], notes = [] }) {
    const names = plan.experts.map(({ ref, weight }) => (weight === 1 ? ref : `${ref} × ${weight}`));
    const who = element("code", {}, names.length ? names.join(" + ") : plan.base);
    const summary = element("summary", {}, names.length ? "Plan: " : "Plan: the base alone, ", who, " · why");
    this.#plan.replaceChildren(
      summary,
      ...reasons(plan.experts),
      ...notes.map((note) => element("p", {}, note)),
      ...refused(candidates.filter(({ chosen }) => !chosen)),
    );
    this.#plan.hidden = false;
  }

  /** Show what it took; `extension` is that of the last chunk. */
  measure({ completion_tokens: tokens }, { timings_ms: took, warnings, notes, answers: [facts] }) {
    const parts = [`${count(tokens)} tokens`, `first after ${time(took.ttft / 1000)}`];
    if (took.decode > 0 && tokens > 1) parts.push(speed(((tokens - 1) * 1000) / took.decode));
    if (facts?.finish_reason === "length") parts.push("cut off at the maximum length");
    const remarks = warnings.filter((one) => !notes.includes(one));
    say(this.#figures, [...parts, ...remarks].join(" · "));
  }

  end(remark) {
    this.node.setAttribute("aria-busy", "false");
    if (remark) say(this.#figures, remark);
  }
}

function reasons(experts) {
  return experts.map(({ ref, reason }) => element("p", {}, element("strong", {}, ref), ` ${reason}`));
}

/** The best of those that do not answer, each with the reason. */
function refused(candidates) {
  if (candidates.length === 0) return [];
  const items = candidates.slice(0, LISTED).map(({ ref, reason }) => element("li", {}, element("strong", {}, ref), ` ${reason}`));
  const more = candidates.length - LISTED;
  if (more > 0) items.push(element("li", {}, `and ${count(more)} more`));
  return [element("p", { class: "soft" }, "Not chosen:"), element("ul", {}, ...items)];
}

class Page {
  #client = new Client();
  #choice = new Choice();
  #messages = [];
  #running = null;

  begin() {
    byId("ask").addEventListener("submit", (event) => this.#entered(event));
    byId("compose").addEventListener("submit", (event) => this.#submitted(event));
    byId("message").addEventListener("keydown", (event) => this.#pressed(event));
    byId("stop").addEventListener("click", () => this.#stop());
    byId("clear").addEventListener("click", () => this.#clear());
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this.#stop());
    this.#open();
  }

  /** Ask what can answer here, until the server says so or wants a key. */
  async #open() {
    try {
      const offer = await (await this.#client.get("/v1/experts")).json();
      this.#choice.offer(offer);
      say(byId("served"), offer.base);
      state("live", "Ready");
      byId("ask").hidden = true;
      byId("chat").hidden = false;
      byId("message").focus();
    } catch (error) {
      if (error.status === 401) return this.#wantsKey();
      state("lost", error instanceof Refusal ? error.message : "The server does not answer");
      setTimeout(() => this.#open(), WAIT);
    }
  }

  #wantsKey() {
    if (this.#client.key !== null) say(byId("ask-why"), "The server does not take this key. Is it whole, and not revoked?");
    this.#client.key = null;
    byId("ask").hidden = false;
    byId("chat").hidden = true;
    state("wait", "Waiting for a key");
    byId("key").focus();
  }

  #entered(event) {
    event.preventDefault();
    const field = byId("key");
    this.#client.key = field.value.trim();
    field.value = "";
    this.#open();
  }

  #pressed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("compose").requestSubmit();
  }

  #submitted(event) {
    event.preventDefault();
    const field = byId("message");
    const text = field.value.trim();
    if (this.#running !== null || text === "") return;
    if (this.#choice.problem) return this.#complain(this.#choice.problem);
    field.value = "";
    this.#send(text);
  }

  async #send(text) {
    this.#running = new AbortController();
    this.#complain("");
    this.#busy(true);
    const asked = element("article", { class: "turn asked", "aria-label": "You" }, element("p", { class: "text" }, text));
    const answer = new Answer();
    byId("turns").append(asked, answer.node);
    this.#follow();
    try {
      await this.#answer(text, answer);
      answer.end();
      this.#messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    } catch (error) {
      this.#failed(error, { text, answer, asked });
    }
    this.#running = null;
    this.#busy(false);
  }

  /** Show the plan first, then the answer as it is written. */
  async #answer(text, answer) {
    const { signal } = this.#running;
    const [fields, model] = [this.#choice.planFields, this.#choice.model];
    if (fields !== null) answer.explain(await (await this.#client.post("/v1/route", { prompt: text, ...fields }, signal)).json());
    const messages = [...this.#messages, { role: "user", content: text }];
    const body = { model, messages, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of events(await this.#client.post("/v1/chat/completions", body, signal))) {
      if (chunk.error) throw new Refusal(500, chunk.error, null);
      const follows = this.#isAtEnd();
      answer.write(chunk.choices[0]?.delta ?? {});
      if (chunk.expertctl) {
        if (fields === null) answer.explain(chunk.expertctl);
        answer.measure(chunk.usage, chunk.expertctl);
      }
      if (follows) this.#follow();
    }
  }

  /** A stopped answer stays, as far as it came; a refused message goes back where it was written. */
  #failed(error, { text, answer, asked }) {
    const wasStopped = error.name === "AbortError";
    answer.end(wasStopped ? "Stopped." : "Not finished.");
    if (answer.text !== "") {
      this.#messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    } else {
      asked.remove();
      answer.node.remove();
      if (byId("message").value === "") byId("message").value = text;
    }
    if (error.status === 401) return this.#wantsKey();
    if (!wasStopped) this.#complain(wordsOf(error));
  }

  #stop() {
    this.#running?.abort();
  }

  #clear() {
    this.#messages = [];
    byId("turns").replaceChildren();
    this.#complain("");
    byId("message").focus();
  }

  #busy(isBusy) {
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("clear").disabled = isBusy;
    state("live", isBusy ? "Answering" : "Ready");
    if (hadFocus) byId(isBusy ? "stop" : "message").focus();
  }

  #complain(words) {
    say(byId("problem"), words);
    byId("problem").hidden = words === "";
  }

  #isAtEnd() {
    const list = byId("turns");
    return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  }

  #follow() {
    byId("turns").scrollTop = byId("turns").scrollHeight;
  }
}

function wordsOf(error) {
  if (!(error instanceof Refusal)) return "The server does not answer; is it running?";
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  return error.hint ? `${message.replace(/\.$/, "")}; ${error.hint}.` : message;
}

/** Say how it goes; it is read out when it changes. */
function state(kind, text) {
  const node = byId("state");
  node.dataset.kind = kind;
  say(node, text);
}

new Page().begin();
