// The page, wired: which key and button does what, and what a run changes. The parts know nothing of each other:
// manuscript.js (the text), settings.js (the fields), status.js (the line between), completion.js (the server),
// memory.js (what a reload keeps), key.js (the key, where the service asks for one).

import { complete, model, CompletionError } from "./completion.js";
import { useKey } from "./key.js";
import { Manuscript } from "./manuscript.js";
import { load, save } from "./memory.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";

const FIRST_TEXT = "Once upon a time";
const $ = (id) => document.getElementById(id);

const area = $("document");
const manuscript = new Manuscript(area);
const numbers = { firstToken: $("first-token"), rate: $("rate"), count: $("count"), seed: $("used-seed") };
const status = new Status($("status"), numbers);
const settings = new Settings({
  source: $("source"),
  temperature: $("temperature"),
  top_p: $("top-p"),
  max_tokens: $("max-tokens"),
  seed: $("seed"),
});

let run = null; // the AbortController of the run that is going on

async function generate() {
  if (run) return;
  run = new AbortController();
  const { signal } = run;
  const typed = settings.typed;
  if ($("source-field").hidden) delete typed.source;
  manuscript.open();
  status.sent();
  refresh();
  try {
    for await (const { type, data } of complete(manuscript.text, typed, signal)) {
      if (type === "start") started(data, typed);
      if (type === "queue") status.queued(data);
      if (type === "token") written(data.text);
      if (type === "done") status.done(data);
    }
  } catch (error) {
    if (signal.aborted) status.stopped();
    else failed(error);
  } finally {
    run = null;
    manuscript.close();
    remember();
    refresh();
  }
}

function started(data, typed) {
  status.started(data);
  settings.explain(typed, { ...data.settings, seed: null }); // an empty seed is random again the next time
  showModel(data.model, data.weights_version); // other weights may have come since the page was loaded
  $("numbers").hidden = false;
  refresh();
}

function written(text) {
  manuscript.append(text);
  status.token();
}

function failed(error) {
  status.failed(error.message);
  if (error.status === 401) askForKey();
  if (!(error instanceof CompletionError)) console.error(error); // ours, not the server's: for whoever looks
}

function stop() {
  run?.abort();
}

function undo() {
  manuscript.swap();
  remember();
  refresh();
}

function keepSeed() {
  if (status.seed === null) return;
  settings.fill({ seed: status.seed });
  settings.focus("seed"); // the button is about to go, and its focus with it
  remember();
  refresh();
}

// aria-disabled and not disabled: a button that is disabled while it has the focus drops it.
function refresh() {
  const off = (id, value) => $(id).setAttribute("aria-disabled", String(value));
  off("generate", run !== null);
  off("stop", run === null);
  off("undo", manuscript.swappable === null);
  $("undo").textContent = manuscript.swappable === "redo" ? "Redo" : "Undo";
  $("keep-seed").hidden = status.seed === null || settings.typed.seed === status.seed;
}

function remember() {
  manuscript.flush();
  save({ text: manuscript.text, settings: settings.typed });
}

function recall() {
  const state = load();
  manuscript.replace(state?.text ?? FIRST_TEXT);
  settings.fill(state?.settings ?? {});
}

async function introduceModel() {
  try {
    const { id, weights_version: version, sampling_defaults: defaults, has_encoder: encoder } = await model();
    showModel(id, version);
    $("source-field").hidden = !encoder;
    settings.explain(settings.typed, defaults ?? {});
  } catch (error) {
    // While the weights load the server says how long; otherwise the first run tells the model, or what is wrong.
    if (error.status === 401) askForKey();
    if (error.retryAfter) setTimeout(introduceModel, error.retryAfter * 1000);
  }
}

function askForKey() {
  $("key-form").hidden = false;
}

function keyTyped(event) {
  event.preventDefault();
  if (!useKey($("key").value)) return status.failed("A key is one word of letters, digits and signs.");
  $("key").value = "";
  $("key-form").hidden = true;
  status.show("idle", "Idle");
  area.focus();
  introduceModel();
}

function showModel(name, version) {
  $("model").textContent = name ?? "";
  $("weights").textContent = version ? `weights ${version.replace(/^sha256:/, "").slice(0, 8)}` : "";
  $("weights").title = version ?? "";
}

function pressed(event) {
  const enter = event.key === "Enter" && (event.ctrlKey || event.metaKey);
  const escape = event.key === "Escape" && run !== null;
  if (event.isComposing || !(enter || escape)) return;
  event.preventDefault();
  if (event.repeat) return; // a key that is held is one wish, and no line end either
  if (enter) generate();
  else stop();
}

recall();
refresh();
introduceModel();
if (/Mac|iP/.test(navigator.platform)) $("generate-key").textContent = "\u2318 Enter";
if (matchMedia("(hover: hover)").matches) area.focus({ preventScroll: true }); // on a phone it would open the keyboard

document.addEventListener("keydown", pressed);
document.addEventListener("input", () => (remember(), refresh()));
document.addEventListener("visibilitychange", remember); // the last that a phone tells a page
addEventListener("pagehide", remember);
$("generate").addEventListener("click", generate);
$("stop").addEventListener("click", stop);
$("undo").addEventListener("click", undo);
$("keep-seed").addEventListener("click", keepSeed);
$("key-form").addEventListener("submit", keyTyped);
