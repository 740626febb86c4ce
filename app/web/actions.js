// What the user can do with the document: the buttons, the keys and the views, and the settings with which each run is sent.

import { drawSeed } from "./request/field.js";

const TYPED_INTO = "input:not([type=range], [type=radio]), textarea:not(#document)";

export class Actions {
  #parts;
  #buttons;

  /**
   * `parts`: { notebook, panel, reading, truncation, caret, status }; `buttons`: { generate, regenerate, stop, undo, redo } and
   * `word`, the label of the first; `view`: the switch between views; `documents()` and `help()` open those dialogs.
   */
  constructor(parts, { word, ...buttons }, { view, documents, help }) {
    [this.#parts, this.#buttons] = [parts, { word, ...buttons }];
    const { notebook } = parts;
    const actions = {
      generate: () => this.generate(),
      regenerate: () => this.regenerate(),
      stop: () => notebook.stop(),
      undo: () => notebook.undo(),
      redo: () => notebook.redo(),
    };
    for (const [name, button] of Object.entries(buttons)) button.addEventListener("click", actions[name]);
    const views = { inspect: () => view.toggle("inspect"), branches: () => view.toggle("tree") };
    listen({ ...actions, ...views, documents, help }, () => notebook.running);
  }

  /** Continues the text at the end, the caret or the selection; asks the user first if that is ambiguous. */
  generate() {
    const { notebook, caret } = this.#parts;
    if (notebook.running) return;
    if (caret.isOpen) return caret.ask(() => this.generate());
    const { span } = caret;
    notebook.generate(this.#request(span), span);
  }

  /** As generate(), with each of these settings, [{ name, typed, origin }, ...], and the same seed. */
  compare(variants) {
    const { notebook, panel, caret } = this.#parts;
    if (notebook.running) return;
    if (caret.isOpen) return caret.ask(() => this.compare(variants));
    const { span } = caret;
    const all = { seed: panel.typed.seed || drawSeed(), n: "", logprobs: "0" };
    const fields = (typed) => ({ ...this.#request(span), ...typed, ...(span ? caret.fields(span, typed) : {}), ...all });
    notebook.compare(variants.map(({ typed, ...variant }) => ({ ...variant, typed: fields(typed) })), span);
  }

  regenerate() {
    const { notebook, panel, status } = this.#parts;
    if (!notebook.canRegenerate) return;
    const { typed, finish, seed, at, span } = notebook.tree.lastRun.facts; // no finish: the run was stopped
    const before = { ...typed, seed };
    if (span) Object.assign(before, { n: panel.typed.n, max_tokens: panel.typed.max_tokens }); // the span sets these
    const isSame = Object.entries(panel.typed).every(([name, text]) => (before[name] ?? "") === text);
    if (finish && panel.typed.seed && isSame) {
      status.show("idle", "The seed is locked, so the text would be the same. Unlock it, or change a setting.");
    } else notebook.regenerate(this.#request(span ? { ...span, start: at } : null));
  }

  /** Replaces the token at that position. A token that ends the text cannot be continued. */
  pick(at, token) {
    const { notebook, status } = this.#parts;
    if (notebook.running) return status.show("streaming", "Stop the run first, then take another token.");
    if (token.bytes.length) notebook.pick(at, token, this.#request());
    else if (at < notebook.text.length) notebook.open(notebook.text.slice(0, at));
  }

  /** Updates which actions are available. */
  show() {
    const { notebook, caret } = this.#parts;
    const { word, generate, stop, undo, redo, regenerate } = this.#buttons;
    // aria-disabled instead of disabled, since disabling a focused button drops the focus.
    const enable = (button, isEnabled) => button.setAttribute("aria-disabled", String(!isEnabled));
    swap(generate, stop, notebook.running);
    enable(undo, notebook.canUndo);
    enable(redo, notebook.canRedo);
    enable(regenerate, notebook.canRegenerate);
    caret.show();
    const { span } = caret;
    const words = span && (span.end > span.start ? "Rewrite" : "Insert here");
    word.textContent = words ?? (notebook.tree.lastRun ? "Continue" : "Generate");
  }

  // The inspect view shows alternatives as tokens arrive; if it is closed, the page scores the text later. The tree shows
  // probabilities only, which need no alternatives.
  #request(span = null) {
    const { notebook, panel, reading, truncation, caret } = this.#parts;
    const cut = span?.isInfill ? {} : truncation.fields(notebook.text);
    const fields = { logprobs: reading.isOpen ? "20" : "0", ...cut, ...panel.typed };
    return span ? { ...fields, ...caret.fields(span, panel.typed) } : fields;
  }
}

// Replaces one button by another, which takes over the focus.
function swap(first, second, isSecond) {
  const [shown, gone] = isSecond ? [second, first] : [first, second];
  const hadFocus = document.activeElement === gone;
  [shown.hidden, gone.hidden] = [false, true];
  if (hadFocus) shown.focus();
}

// Maps keys to named actions. A focused field keeps its own keys (undo in a number field, Enter in a text).
// `actions`: { generate, regenerate, stop, undo, redo, inspect, branches, documents, help }; `running()`: whether there is
// something to stop.
function listen(actions, running) {
  document.addEventListener("keydown", (event) => {
    const name = event.isComposing ? null : nameOf(event, running());
    if (!name) return;
    event.preventDefault();
    // A repeated keydown counts once, except for undo and redo, which step.
    if (!event.repeat || name === "undo" || name === "redo") actions[name]();
  });
}

function nameOf({ key, target, ctrlKey, metaKey, altKey, shiftKey }, isRunning) {
  if (target.closest?.("dialog")) return null;
  if (key === "Escape") return isRunning ? "stop" : null;
  if (key === "?" && !target.closest?.("input, textarea, select")) return "help";
  if (!(ctrlKey || metaKey) || altKey) return null; // some keyboard layouts type letters with Ctrl+Alt
  if (key === "/") return "help";
  if (key.toLowerCase() === "k" && !shiftKey) return "documents";
  if (key === "Enter") return shiftKey ? "regenerate" : "generate";
  if (target.closest?.(TYPED_INTO)) return null;
  const letter = key.toLowerCase();
  if (letter === "i" && !shiftKey) return "inspect";
  if (letter === "b" && !shiftKey) return "branches";
  if (letter === "z") return shiftKey ? "redo" : "undo";
  return letter === "y" ? "redo" : null;
}

/** Switches between the views of the document: write, inspect, and tree. */
export class ViewSwitch {
  #elements;
  #parts;
  #places = {}; // scroll position of each view

  /** `elements`: { scroller, write, inspect, tree, buttons: { write, inspect, tree } }, the views and their buttons;
      `parts`: { sheet, reading, treeView, announcer }. */
  constructor(elements, parts) {
    [this.#elements, this.#parts] = [elements, parts];
    for (const [name, button] of Object.entries(elements.buttons)) button.addEventListener("click", () => this.show(name));
  }

  /** Toggles between this view and writing, for a keyboard shortcut: moves the focus, too. */
  toggle(name) {
    this.show(this.#elements[name].hidden ? name : "write", { withFocus: true });
  }

  /** Writing and inspecting share a scroll position, since their lines are the same. */
  show(name, { withFocus = this.#elements.scroller.contains(document.activeElement) } = {}) {
    const { scroller, buttons, tree } = this.#elements;
    const { sheet, reading, treeView, announcer } = this.#parts;
    if (!this.#elements[name].hidden) return;
    this.#places[tree.hidden ? "text" : "tree"] = scroller.scrollTop;
    for (const [other, button] of Object.entries(buttons)) {
      button.setAttribute("aria-pressed", String(other === name));
      if (other !== "inspect") this.#elements[other].hidden = other !== name;
    }
    announcer.muted = name !== "write"; // screen readers read tokens and branches one by one
    if (name === "inspect") reading.open({ withFocus });
    else reading.close();
    if (name === "write") sheet.flush();
    scroller.scrollTop = this.#places[name === "tree" ? "tree" : "text"] ?? 0;
    if (name === "tree") treeView.open({ withFocus });
    if (name === "write" && withFocus) sheet.focus();
  }
}
