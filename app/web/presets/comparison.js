// The dialog that chooses what to compare: two to four settings, each a column, all with the same seed.

import { classed, element, put } from "../elements.js";
import { applied, description, isApplied } from "./presets.js";

const MOST = 4; // columns

export class Comparison {
  #dialog;
  #page;
  #rows = classed("div", "comparison-rows");
  #start = Object.assign(element("button"), { type: "submit", className: "primary" });

  /**
   * `page`: { presets(), typed() the settings on the page, start(variants) sends the runs, [{ name, typed }, ...] }.
   */
  constructor(dialog, page) {
    [this.#dialog, this.#page] = [dialog, page];
    const title = element("h2", "Compare settings");
    title.id = "comparison-title";
    dialog.setAttribute("aria-labelledby", title.id);
    const note = classed("p", "comparison-note", `The text goes on with each of these side by side, ${MOST} at most, all with the same seed.`);
    const close = Object.assign(element("button", "Cancel"), { type: "button", onclick: () => dialog.close() });
    const form = put(element("form"), title, note, this.#rows, put(classed("div", "comparison-buttons"), close, this.#start));
    form.addEventListener("change", () => this.#show());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const variants = this.#chosen;
      if (variants.length < 2) return;
      dialog.close();
      page.start(variants);
    });
    dialog.append(form);
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close()); // on the backdrop
  }

  open() {
    const typed = this.#page.typed();
    const presets = this.#page.presets();
    const current = presets.find((preset) => isApplied(preset, typed));
    const others = presets.filter((preset) => preset !== current).map((preset) => variantOf(preset, typed));
    const first = current ? variantOf(current, typed) : { name: "Current settings", words: "As they are on the page.", typed };
    this.#rows.replaceChildren(...[first, ...others].map((variant, index) => row(variant, index < 2)));
    this.#show();
    this.#dialog.showModal();
    this.#rows.querySelector("input").focus();
  }

  get #chosen() {
    return [...this.#rows.children].filter((one) => one.querySelector("input").checked).map(({ variant }) => variant);
  }

  // One more than there are columns cannot be chosen.
  #show() {
    const { length } = this.#chosen;
    for (const input of this.#rows.querySelectorAll("input")) input.disabled = length >= MOST && !input.checked;
    this.#start.textContent = length < 2 ? "Choose two" : `Compare ${length}`;
    this.#start.setAttribute("aria-disabled", String(length < 2));
  }
}

function variantOf(preset, typed) {
  return { name: preset.name, words: description(preset), typed: applied(preset, typed) };
}

function row(variant, isChosen) {
  const input = Object.assign(element("input"), { type: "checkbox", checked: isChosen });
  const words = put(element("span"), element("strong", variant.name), classed("span", "comparison-words", variant.words));
  return Object.assign(put(element("label"), input, words), { variant });
}
