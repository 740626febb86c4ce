// Entry point: connects the page's components, which are independent of each other, to keys, buttons and runs.

import { Exchange } from "./exchange.js";
import { listen } from "./keyboard.js";
import { flush, load, remember } from "./memory.js";
import { Notebook } from "./notebook.js";
import { complete, CompletionError } from "./request/completion.js";
import { Panel } from "./request/panel.js";
import { Reach } from "./request/reach.js";
import { Service } from "./service.js";
import { Status } from "./status.js";
import { Announcer } from "./text/announcer.js";
import { Branches } from "./text/branches.js";
import { Columns } from "./text/columns.js";
import { lastSentence } from "./text/sentences.js";
import { Sheet } from "./text/sheet.js";
import { Tree } from "./text/tree.js";
import { nextToken, score, tokenize } from "./tokens/questions.js";
import { Reading } from "./tokens/reading.js";

const FIRST_TEXT = "Once upon a time";
const KEPT = [
  "", // all of it
  "The browser's storage is full: it keeps the text, not its history.",
  "The browser stores nothing here: copy the text before you close the page.",
];
const $ = (id) => document.getElementById(id);
const hasKeyboard = matchMedia("(hover: hover)").matches; // on a phone, a focused field would open one over the page

const numbers = {
  firstToken: $("first-token"),
  rate: $("rate"),
  count: $("count"),
  context: $("context"),
  seed: $("used-seed"),
};
const status = new Status($("status"), $("remedy"), numbers);
const state = load();
const reach = new Reach(state?.reach);
const panel = new Panel($("panel"), { onchange: changedSettings });
const sheet = new Sheet(
  { scroller: $("paper"), area: $("document"), mirror: $("mirror") },
  { ontype: typed },
);
const announcer = new Announcer($("announcer"));
const branches = new Branches($("branches"), { onselect: (id) => notebook.go(id) });
const columns = new Columns($("columns"), {
  over: $("paper"),
  ontake: (index) => notebook.go(drafts[index].id),
  onclose: () => sheet.focus(),
  announce: (words) => announcer.say(words),
});
const reading = new Reading(
  { inspect: $("inspect"), scroller: $("paper"), note: $("reading-note"), next: $("next"), bars: $("bars") },
  { tokenize, score, next: (prompt, signal) => nextToken(prompt, signal, { source: panel.typed.source, ...within(prompt) }) },
  { onpick: pick, onerror: (error) => service.failed(error) },
);
const service = new Service(
  { model: $("model"), weights: $("weights"), form: $("key-form"), key: $("key") },
  { known, described, keyed, unknown, refused: (sentence) => status.failed(sentence) },
);
let isConnecting = true; // the status line says so, or why the model's facts could not be read
let drafts = []; // the nodes of the tree that the last run made
const notebook = new Notebook(send, { changed, began, received, wrote, ended }, recall());
const failing = (message) => status.failed(message);
const exchange = new Exchange({
  notebook,
  panel,
  reach: () => within(notebook.text),
  elements: { exits: $("exits"), receipt: $("receipt") },
  failed: failing,
});
let sent = {}; // the settings of the last run, as they were typed
let kept = 0; // index of the last message in KEPT that the user has seen

function send(prompt, typed, signal) {
  sent = typed;
  return complete(prompt, typed, signal, panel.parameters);
}

// Events of the notebook

function changed() {
  columns.close();
  offer(false);
  sheet.show(notebook.text, notebook.written);
  branches.show(notebook.tree.runs());
  reading.show(notebook);
  showSeed();
  refresh();
}

function began(count) {
  sheet.open({ withEnd: count === 1 });
  branches.hold(true);
  if (count > 1) columns.open(count, lastSentence(notebook.text));
  else columns.close();
  reading.show(notebook);
  isConnecting = false; // from here on the line tells of the run
  status.sent();
  offer(false);
  refresh();
}

function received(type, data) {
  if (type === "start") started(data);
  if (type === "queue") status.queued(data);
  if (type === "wait") status.waits(data);
  if (type === "lost") status.lost();
  if (type === "done") finished(data);
}

function started(data) {
  status.started(data);
  const all = Object.entries({ ...data.settings, seed: data.seed });
  panel.explain(Object.fromEntries(all.filter(([name]) => !sent[name])));
  service.show(data.model, data.weights_version); // other weights may have come since the page was loaded
  $("numbers").hidden = false;
  refresh();
}

function wrote(index, unit, text) {
  if (columns.isOpen) columns.append(index, text, unit.tokens);
  else {
    sheet.append(text);
    reading.append(unit, text);
    announcer.stream(text);
  }
  status.token(index);
}

function finished(data) {
  status.done(data);
  if (!columns.isOpen && status.isFull && !reach.covers(notebook.text)) offer(true);
  if (columns.isOpen) for (const { index, finish_reason: reason } of data.choices) columns.finish(index, reason);
}

function ended({ error, stopped, nodes }) {
  sheet.close();
  announcer.end();
  drafts = nodes;
  if (nodes.some(Boolean)) columns.end();
  else columns.close(); // nothing came
  branches.hold(false);
  branches.show(notebook.tree.runs());
  reading.show(notebook);
  if (stopped) status.stopped();
  if (error) failed(error);
  refresh();
  exchange.open(); // a link that was followed meanwhile
}

function failed(error) {
  status.failed(error.message);
  service.failed(error);
  if (error.detail?.code === "context_length_exceeded") offer(true);
  if (!(error instanceof CompletionError)) console.error(error); // a bug of the page, not a server error
}

// Events of the service

function known(facts) {
  if (isConnecting) status.show("idle", "Ready");
  isConnecting = false;
  status.context = facts.max_model_len;
  exchange.modelFacts = facts;
  reading.vocabulary = facts.n_vocab;
  changedSettings();
}

function described(parameters, facts) {
  panel.build(parameters, facts.sampling_defaults);
  if (facts.has_encoder && !panel.typed.source) panel.open("source", { withFocus: hasKeyboard }); // it is required
  showSeed();
}

// The page works on: the next run shows whether the service is back.
function unknown(error) {
  isConnecting = true;
  if (error.retryAfter) status.waits({ seconds: error.retryAfter, message: error.message });
  else if (error.status === 401) status.show("idle", "Enter the key of this service.");
  else status.failed(error.message);
}

// Shows the seed of the current text, so that the user can lock it, also after a reload or on another branch.
function showSeed() {
  const seed = notebook.tree.lastRun?.facts.seed;
  if (seed) panel.explain({ seed });
}

function keyed() {
  status.show("idle", "Connecting");
  sheet.focus();
}

// Actions of the user

function typed(text, isStep) {
  notebook.type(text, isStep);
  offer(false);
  sheet.paint(notebook.text, notebook.written);
  reading.show(notebook);
  refresh();
}

// The inspect view shows tokens as they arrive; without it the page scores them afterwards. With several continuations
// to choose from, the page shows the probability of each, which needs no alternatives.
function request() {
  const { typed } = panel;
  const tokens = reading.isOpen ? "20" : Number(typed.n) > 1 ? "0" : "";
  return { logprobs: tokens, ...within(notebook.text), ...typed };
}

function generate() {
  notebook.generate(request());
}

function regenerate() {
  if (!notebook.canRegenerate) return;
  const { typed, finish, seed } = notebook.tree.lastRun.facts; // one that was stopped has more to come
  const before = { ...typed, seed };
  const isSame = Object.entries(panel.typed).every(([name, text]) => (before[name] ?? "") === text);
  if (finish && panel.typed.seed && isSame) {
    status.show("idle", "The seed is locked, so the text would be the same. Unlock it, or change a setting.");
  } else notebook.regenerate(request());
}

// Replaces the token at that position. A token that ends the text cannot be continued.
function pick(at, token) {
  if (notebook.running) return status.show("streaming", "Stop the run first, then take another token.");
  if (token.bytes.length) notebook.pick(at, token, request());
  else if (at < notebook.text.length) notebook.open(notebook.text.slice(0, at));
}

function changedSettings() {
  reading.settings(panel.typed, service.facts.sampling_defaults ?? {});
  refresh();
}

function look(isInside = !reading.isOpen) {
  const { scrollTop } = $("paper");
  const hadFocus = $("paper").contains(document.activeElement);
  $("write").hidden = isInside;
  $("view-write").setAttribute("aria-pressed", String(!isInside));
  $("view-inspect").setAttribute("aria-pressed", String(isInside));
  announcer.muted = isInside; // there each token is a thing to read by itself
  if (isInside) reading.open({ withFocus: hadFocus });
  else reading.close();
  if (!isInside && hadFocus) sheet.focus();
  $("paper").scrollTop = scrollTop; // both views set the same lines
}

// aria-disabled and not disabled: a button that is disabled while it has the focus drops it.
function refresh() {
  const off = (id, value) => $(id).setAttribute("aria-disabled", String(value));
  off("generate", notebook.running);
  off("stop", !notebook.running);
  off("undo", !notebook.canUndo);
  off("redo", !notebook.canRedo);
  off("regenerate", !notebook.canRegenerate);
  $("generate-word").textContent = notebook.tree.lastRun ? "Continue" : "Generate";
  exchange.show();
  if (!notebook.running) remember(states, stored);
}

// Shows the message once, and again where it got worse, but never over a run's status.
function stored(index) {
  if (index > kept && !notebook.running) status.show("idle", KEPT[index]);
  if (!notebook.running) kept = index;
}

// The states to store: with the history, or the text alone where the storage is too small.
function states() {
  const settings = panel.typed;
  const alone = new Tree({ text: notebook.text, units: notebook.units });
  return [notebook.soFar, alone].map(({ data }) => ({ tree: data, settings, reach: reach.data }));
}

// A running generation ends with the page; its output so far is stored.
function pageHidden() {
  if (notebook.running) remember(states, stored);
  flush();
}

function recall() {
  try {
    panel.fill(state.settings);
    return Tree.from(state.tree);
  } catch {
    return new Tree({ text: FIRST_TEXT, units: [] });
  }
}

// Offers to go on from the end of a text that is longer than the context, once for this text or always.
function offer(isOffered) {
  $("always-word").hidden = !isOffered && !reach.always;
  $("always").checked = reach.always;
  if (!isOffered) return status.withdraw();
  status.offer(`Go on from the end of it: its last ${promptBudget()} tokens`, () => {
    reach.agree(notebook.text);
    $("generate").focus(); // the button disappears, and its focus with it
    generate();
  });
}

// The request field that truncates this prompt, if the user agreed to that.
function within(prompt) {
  return reach.fields(prompt, promptBudget());
}

// Context tokens left for the prompt, at least half of the context.
function promptBudget() {
  const context = service.facts.max_model_len ?? 0;
  return Math.max(context - (Number(panel.typed.max_tokens) || 128), Math.ceil(context / 2));
}

changed();
sheet.toEnd();
service.introduce();
if (/Mac|iP/.test(navigator.platform)) $("generate-key").textContent = "\u2318 Enter";
if (hasKeyboard) sheet.focus();

const actions = {
  generate,
  regenerate,
  stop: () => notebook.stop(),
  undo: () => notebook.undo(),
  redo: () => notebook.redo(),
};
for (const [id, action] of Object.entries(actions)) $(id).addEventListener("click", action);
$("always").addEventListener("change", ({ target }) => {
  reach.always = target.checked;
  refresh();
});
$("view-write").addEventListener("click", () => look(false));
$("view-inspect").addEventListener("click", () => look(true));
listen({ ...actions, look: () => look() }, () => notebook.running);
document.addEventListener("visibilitychange", pageHidden); // the last event that a phone sends to a page
addEventListener("pagehide", pageHidden);
