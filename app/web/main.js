// Entry point: creates the page's components, which are independent of each other, and connects them.

import { Actions } from "./actions.js";
import { Autosave } from "./autosave.js";
import { Exchange } from "./exchange.js";
import { Notebook } from "./notebook.js";
import { showPreferences } from "./preferences.js";
import { complete } from "./request/completion.js";
import { Panel } from "./request/panel.js";
import { RunDisplay } from "./run-display.js";
import { Service } from "./service.js";
import { Status } from "./status.js";
import { Announcer } from "./text/announcer.js";
import { Branches } from "./text/branches.js";
import { Columns } from "./text/columns.js";
import { Sheet } from "./text/sheet.js";
import { Tree } from "./text/tree.js";
import { nextToken, score, tokenize } from "./tokens/questions.js";
import { Reading } from "./tokens/reading.js";
import { Truncation } from "./truncation.js";
import { ViewSwitch } from "./view-switch.js";

const FIRST_TEXT = "Once upon a time";
const $ = (id) => document.getElementById(id);
const hasKeyboard = matchMedia("(hover: hover)").matches; // on a phone, a focused field would open one over the page

const autosave = new Autosave();
const state = autosave.load();
const status = new Status($("status"), $("remedy"), {
  firstToken: $("first-token"),
  rate: $("rate"),
  count: $("count"),
  context: $("context"),
  seed: $("used-seed"),
});
const panel = new Panel($("panel"), { onchange: changedSettings });
const sheet = new Sheet({ scroller: $("paper"), area: $("document"), mirror: $("mirror") }, { ontype: typed });
const announcer = new Announcer($("announcer"));
const branches = new Branches($("branches"), { onselect: (id) => notebook.go(id) });
const columns = new Columns($("columns"), {
  over: $("paper"),
  ontake: (index) => display.take(index),
  onclose: () => sheet.focus(),
  announce: (words) => announcer.say(words),
});
const reading = new Reading(
  { inspect: $("inspect"), scroller: $("paper"), note: $("reading-note"), next: $("next"), bars: $("bars") },
  { tokenize, score, next: predict },
  { onpick: (at, token) => actions.pick(at, token), onerror: (error) => service.failed(error) },
);
const service = new Service(
  { model: $("model"), weights: $("weights"), form: $("key-form"), key: $("key") },
  { status, onmodel: showModel, onparameters: showParameters, onkey: () => sheet.focus() },
);
const truncation = new Truncation(
  { status, label: $("always-word"), checkbox: $("always") },
  {
    text: () => notebook.text,
    context: () => service.facts.max_model_len ?? 0,
    maxTokens: () => Number(panel.typed.max_tokens) || 128,
    onagree,
    onchange: refresh,
  },
  state?.reach,
);
const display = new RunDisplay(
  { sheet, columns, branches, reading, announcer, status, panel, service, truncation, numbers: $("numbers") },
  { onchange: refresh, onend: () => exchange.open() }, // a link that was followed meanwhile
);
const notebook = new Notebook(send, display, recall());
display.notebook = notebook;
const exchange = new Exchange({
  notebook,
  panel,
  truncation,
  elements: { exits: $("exits"), receipt: $("receipt") },
  failed: (message) => status.failed(message),
});
const view = new ViewSwitch(
  { scroller: $("paper"), write: $("write"), buttons: { write: $("view-write"), inspect: $("view-inspect") } },
  { sheet, reading, announcer },
);
const actions = new Actions(
  { notebook, panel, reading, truncation, status },
  {
    generate: $("generate"),
    word: $("generate-word"),
    regenerate: $("regenerate"),
    stop: $("stop"),
    undo: $("undo"),
    redo: $("redo"),
  },
  { look: () => view.look(), help: () => $("help").open || $("help").showModal() },
);

showPreferences($("preferences"), ({ spelling }) => ($("document").spellcheck = spelling === "on"));
$("show-help").addEventListener("click", () => $("help").showModal());
autosave.begin({ states, isRunning: () => notebook.running, warn: (sentence) => status.show("idle", sentence) });
display.changed();
sheet.toEnd();
service.introduce();
if (/Mac|iP/.test(navigator.platform)) $("generate-key").textContent = "\u2318 Enter";
if (hasKeyboard) sheet.focus();

function send(prompt, fields, signal) {
  return complete(prompt, fields, signal, panel.parameters);
}

function predict(prompt, signal) {
  return nextToken(prompt, signal, { source: panel.typed.source, ...truncation.fields(prompt) });
}

function typed(text, isStep) {
  notebook.type(text, isStep);
  truncation.withdraw();
  sheet.paint(notebook.text, notebook.written);
  reading.show(notebook);
  refresh();
}

function changedSettings() {
  reading.settings(panel.typed, service.facts.sampling_defaults ?? {});
  refresh();
}

function refresh() {
  actions.show();
  exchange.show();
  if (!notebook.running) autosave.later();
}

function showModel(facts) {
  status.context = facts.max_model_len;
  exchange.modelFacts = facts;
  reading.vocabulary = facts.n_vocab;
  changedSettings();
}

function showParameters(parameters, facts) {
  panel.build(parameters, facts.sampling_defaults);
  if (facts.has_encoder && !panel.typed.source) panel.open("source", { withFocus: hasKeyboard }); // it is required
  display.showSeed();
}

function onagree() {
  $("generate").focus(); // the button that agreed disappears, and its focus with it
  actions.generate();
}

// The states to store: with the history, or the text alone where the storage is too small.
function states() {
  const settings = panel.typed;
  const alone = new Tree({ text: notebook.text, units: notebook.units });
  return [notebook.soFar, alone].map(({ data }) => ({ tree: data, settings, reach: truncation.data }));
}

function recall() {
  try {
    panel.fill(state.settings);
    return Tree.from(state.tree);
  } catch {
    return new Tree({ text: FIRST_TEXT, units: [] });
  }
}
