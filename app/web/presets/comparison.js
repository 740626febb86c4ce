// The dialog that chooses what to compare: two to four settings or models, each a column, all with the same seed.

import { classed, element, put } from "../elements.js";
import { model } from "../request/completion.js";
import { applied, description, isApplied } from "./presets.js";

const MOST = 4; // columns

export class Comparison {
  #dialog;
  #page;
  #rows = classed("div", "comparison-rows");
  #start = Object.assign(element("button"), { type: "submit", className: "primary" });

  /**
   * `page`: { presets(), typed() the settings on the page, facts() of the model, start(variants) sends the runs, [{ name,
   * typed, origin }, ...] }.
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
      const variants = withModels(this.#chosen, this.#page.facts().id);
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
    const rows = [first, ...others].map((variant, index) => row(variant, index < 2));
    const elsewhere = (this.#page.facts().compare_origins ?? []).map((origin) => row({ name: origin, words: "Asking which model it has.", typed, origin }));
    this.#rows.replaceChildren(...rows, ...elsewhere);
    this.#show();
    for (const one of elsewhere) this.#ask(one);
    this.#dialog.showModal();
    this.#rows.querySelector("input").focus();
  }

  get #chosen() {
    return [...this.#rows.children].filter((one) => one.querySelector("input").checked).map(({ variant }) => variant);
  }

  // Another service can be chosen once it has said which model it has.
  async #ask(one) {
    const { variant } = one;
    const say = (sentence) => (one.querySelector(".comparison-words").textContent = sentence);
    try {
      const { id } = await model(variant.origin);
      variant.model = `${id} (${new URL(variant.origin).host})`;
      say(`${variant.model}, with the settings as they are on the page.`);
    } catch (error) {
      say(error.message);
    }
    this.#show();
  }

  // One more than there are columns cannot be chosen.
  #show() {
    const { length } = this.#chosen;
    for (const { control, variant } of this.#rows.children) {
      control.disabled = (length >= MOST && !control.checked) || (variant.origin && !variant.model);
    }
    this.#start.textContent = length < 2 ? "Choose two" : `Compare ${length}`;
    this.#start.setAttribute("aria-disabled", String(length < 2));
  }
}

// With the name of its model each, where there is more than one.
function withModels(variants, own) {
  if (!variants.some(({ origin }) => origin)) return variants;
  return variants.map(({ name, model = own, origin, ...variant }) => ({ ...variant, origin, name: origin ? model : `${model}: ${name}` }));
}

function variantOf(preset, typed) {
  return { name: preset.name, words: description(preset), typed: applied(preset, typed) };
}

function row(variant, isChosen) {
  const input = Object.assign(element("input"), { type: "checkbox", checked: isChosen });
  const words = put(element("span"), element("strong", variant.name), classed("span", "comparison-words", variant.words));
  return Object.assign(put(element("label"), input, words), { variant });
}
