// What the user can do with the document: the buttons and the keys, and the settings with which each run is sent.

import { listen } from "./keyboard.js";
import { drawSeed } from "./request/seed.js";

export class Actions {
  #parts;
  #buttons;

  /**
   * `parts`: { notebook, panel, reading, truncation, status }; `buttons`: { generate, regenerate, stop, undo, redo } and
   * `word`, what the first one says; `view`: what switches between the views; `help()` shows the keys.
   */
  constructor(parts, { word, ...buttons }, { view, help }) {
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
    listen({ ...actions, ...views, help }, () => notebook.running);
  }

  generate() {
    this.#parts.notebook.generate(this.#request());
  }

  /** Continues the text with each of these settings, [{ name, typed }, ...], and the same seed. */
  compare(variants) {
    const { notebook, panel } = this.#parts;
    const seed = panel.typed.seed || drawSeed();
    notebook.compare(variants.map(({ name, typed }) => ({ name, typed: { ...this.#request(), ...typed, seed, n: "", logprobs: "0" } })));
  }

  regenerate() {
    const { notebook, panel, status } = this.#parts;
    if (!notebook.canRegenerate) return;
    const { typed, finish, seed } = notebook.tree.lastRun.facts; // one that was stopped has more to come
    const before = { ...typed, seed };
    const isSame = Object.entries(panel.typed).every(([name, text]) => (before[name] ?? "") === text);
    if (finish && panel.typed.seed && isSame) {
      status.show("idle", "The seed is locked, so the text would be the same. Unlock it, or change a setting.");
    } else notebook.regenerate(this.#request());
  }

  /** Replaces the token at that position. A token that ends the text cannot be continued. */
  pick(at, token) {
    const { notebook, status } = this.#parts;
    if (notebook.running) return status.show("streaming", "Stop the run first, then take another token.");
    if (token.bytes.length) notebook.pick(at, token, this.#request());
    else if (at < notebook.text.length) notebook.open(notebook.text.slice(0, at));
  }

  /** Shows which actions there are now. */
  show() {
    const { notebook } = this.#parts;
    const { word, generate, stop, undo, redo, regenerate } = this.#buttons;
    // aria-disabled and not disabled: a button that is disabled while it has the focus drops it.
    const enable = (button, isEnabled) => button.setAttribute("aria-disabled", String(!isEnabled));
    swap(generate, stop, notebook.running);
    enable(undo, notebook.canUndo);
    enable(redo, notebook.canRedo);
    enable(regenerate, notebook.canRegenerate);
    word.textContent = notebook.tree.lastRun ? "Continue" : "Generate";
  }

  // The inspect view shows tokens as they arrive; without it the page scores them afterwards. The tree shows what each
  // run was worth, which needs no alternatives.
  #request() {
    const { notebook, panel, reading, truncation } = this.#parts;
    return { logprobs: reading.isOpen ? "20" : "0", ...truncation.fields(notebook.text), ...panel.typed };
  }
}

// One button in the place of another; the focus goes with it.
function swap(first, second, isSecond) {
  const [shown, gone] = isSecond ? [second, first] : [first, second];
  const hadFocus = document.activeElement === gone;
  [shown.hidden, gone.hidden] = [false, true];
  if (hadFocus) shown.focus();
}
