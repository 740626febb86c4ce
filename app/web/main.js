// Entry point: creates the page's components, which are independent of each other, and connects them.

import { Actions, ViewSwitch } from "./actions.js";
import { Caret } from "./caret.js";
import { Documents } from "./documents/documents.js";
import { Exchange } from "./exchange.js";
import { Notebook } from "./notebook.js";
import { showPreferences } from "./preferences.js";
import { Comparison } from "./presets/comparison.js";
import { PresetBar } from "./presets/preset-bar.js";
import { applied } from "./presets/presets.js";
import { complete, concurrently, nextToken, score, tokenize } from "./request/completion.js";
import { Panel } from "./request/panel.js";
import { RunDisplay } from "./run-display.js";
import { Service } from "./service.js";
import { Status } from "./status.js";
import { Announcer } from "./text/announcer.js";
import { Branches } from "./text/branches.js";
import { Columns } from "./text/columns.js";
import { BranchComparison } from "./text/branch-comparison.js";
import { Sheet } from "./text/sheet.js";
import { titleOf, TreeView } from "./text/tree-view.js";
import { Tree } from "./text/tree.js";
import { TokenUpdates } from "./tokens/token-updates.js";
import { Truncation } from "./truncation.js";

const FIRST_TEXT = "Once upon a time";
const $ = (id) => document.getElementById(id);
let compared = null; // the branch that is compared with the text
let hasKeyboard = matchMedia("(hover: hover)").matches; // on a phone, focusing a field opens a keyboard over the page
addEventListener("keydown", ({ key, ctrlKey, metaKey }) => (hasKeyboard ||= key === "Tab" || ctrlKey || metaKey));

const documents = new Documents({ button: $("documents-button"), dialog: $("documents"), dropzone: $("paper") });
const status = new Status($("status"), $("remedy"), {
  firstToken: $("first-token"),
  rate: $("rate"),
  count: $("count"),
  context: $("context"),
  seed: $("used-seed"),
});
const panel = new Panel($("panel"), { onchange: changedSettings });
const presets = new PresetBar($("presets"), {
  typed: () => panel.typed,
  onapply: (preset) => {
    panel.fill(applied(preset, panel.typed));
    changedSettings();
  },
  oncompare: () => comparison.open(),
});
const comparison = new Comparison($("comparison"), {
  presets: () => presets.presets,
  typed: () => panel.typed,
  facts: () => service.facts,
  start: (variants) => actions.compare(variants),
});
const sheet = new Sheet({ scroller: $("paper"), area: $("document"), mirror: $("mirror") }, { ontype: typed });
const announcer = new Announcer($("announcer"));
const branches = new Branches($("branches"), { onselect: (entry) => notebook.visit(entry) });
const columns = new Columns($("columns"), {
  over: $("paper"),
  ontake: (index) => display.take(index),
  onclose: () => sheet.focus(),
  announce: (words) => announcer.say(words),
});
const compare = new BranchComparison($("compare"), {
  over: $("paper"),
  ontake: (index) => index === 1 && goOn(compared),
  onclose: () => {},
});
const treeView = new TreeView($("tree"), { ongo: goOn, oncompare, announce: (words) => announcer.say(words) });
const reading = new TokenUpdates(
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
  documents.stored?.truncation,
);
const caret = new Caret(
  { radios: [$("at-caret"), $("at-end")], dialog: $("caret-choice") },
  {
    text: () => notebook.text,
    selection: () => ($("write").hidden || columns.isOpen ? null : sheet.selection),
    canFillIn: (text) => service.facts.has_infill === true && !truncation.covers(text),
    onchange: () => actions.show(),
  },
  documents.stored?.caret,
);
const display = new RunDisplay(
  { sheet, columns, branches, treeView, reading, announcer, status, panel, service, truncation, numbers: $("numbers") },
  { onchange: refresh, onbegin, onend: () => exchange.open() }, // a link that was followed meanwhile
);
const notebook = new Notebook(send, display, recall());
display.notebook = treeView.notebook = notebook;
const exchange = new Exchange({
  notebook,
  panel,
  truncation,
  elements: { exits: $("exits"), receipt: $("receipt") },
  failed: (message) => status.failed(message),
});
const view = new ViewSwitch(
  {
    scroller: $("paper"),
    write: $("write"),
    inspect: $("inspect"),
    tree: $("tree"),
    buttons: { write: $("view-write"), inspect: $("view-inspect"), tree: $("view-tree") },
  },
  { sheet, reading, treeView, announcer },
);
const actions = new Actions(
  { notebook, panel, reading, truncation, caret, status },
  {
    generate: $("generate"),
    word: $("generate-word"),
    regenerate: $("regenerate"),
    stop: $("stop"),
    undo: $("undo"),
    redo: $("redo"),
  },
  { view, documents: () => $("documents-button").click(), help: () => $("help").open || $("help").showModal() },
);

showPreferences($("preferences"), ({ spelling }) => ($("document").spellcheck = spelling === "on"));
$("show-help").addEventListener("click", () => $("help").showModal());
documents.begin({ capture, restore, isRunning: () => notebook.running, focus, status });
display.changed();
sheet.toEnd();
if (notebook.text === FIRST_TEXT && !notebook.canUndo) sheet.selectAll(); // a sample, to go on from or to type over
service.introduce();
if (/Mac|iP/.test(navigator.platform)) $("generate-key").textContent = "\u2318 Enter";
focus();

function send(prompt, fields, signal, origins) {
  const one = (typed, index) => complete(prompt, typed, signal, panel.parameters, origins[index]);
  return Array.isArray(fields) ? concurrently(fields.map(one)) : one(fields, 0);
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

// Goes to the text of a branch.
function goOn(entry) {
  view.show("write");
  notebook.visit(entry);
  sheet.focus();
}

function onbegin() {
  compare.close();
  if (!$("tree").hidden) view.show("write");
}

function oncompare(entry) {
  compared = entry;
  const { text } = notebook.tree.node(entry.source).state;
  const title = entry.name || titleOf(entry);
  compare.open([{ title: "Your text as it is", text: notebook.text }, { title, text: text.slice(0, entry.end) }]);
}

function changedSettings() {
  presets.show();
  reading.settings(panel.typed, service.facts.sampling_defaults ?? {});
  refresh();
}

function refresh() {
  actions.show();
  exchange.show();
  documents.changed(notebook.text);
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
  presets.show();
}

function onagree() {
  $("generate").focus(); // the clicked button disappears
  actions.generate();
}

function focus() {
  if (hasKeyboard) sheet.focus();
}

function capture() {
  return { tree: notebook.soFar.data, settings: panel.typed, truncation: truncation.data, caret: caret.data };
}

// Shows another document. One that was imported as text keeps the current settings.
function restore({ tree, settings, truncation: agreement, caret: place }) {
  if (settings) {
    panel.reset();
    panel.fill(settings);
  }
  truncation.restore(agreement);
  caret.restore(place);
  notebook.load(Tree.from(tree));
  changedSettings();
  sheet.toEnd();
}

function recall() {
  try {
    panel.fill(documents.stored.settings);
    return Tree.from(documents.stored.tree);
  } catch {
    return new Tree({ text: FIRST_TEXT, units: [] });
  }
}
