// The presets above the settings: one button each, and a line that says what the pressed one sets. Saves the settings as a
// preset, and renames and deletes what was saved.

import { classed, element, put } from "../elements.js";
import { BUILT_IN, description, isApplied, newName, parsed, PresetError, settingsOf } from "./presets.js";

const KEY = "inkstream.presets";

export class PresetBar {
  #page;
  #saved = [];
  #buttons = classed("div", "preset-buttons");
  #words = classed("p", "preset-words");
  #message = classed("p", "preset-message");
  #actions = classed("div", "preset-actions");
  #form = null; // while a name is asked for

  /** `page`: { typed() the settings on the page, onapply(preset), oncompare() }. */
  constructor(root, page) {
    this.#page = page;
    const title = element("h2", "Presets");
    this.#message.setAttribute("role", "status");
    put(root, title, this.#buttons, this.#words, this.#actions, this.#message);
    this.#read();
    this.show();
    addEventListener("storage", ({ key }) => key === KEY && (this.#read(), this.show())); // of another tab
  }

  /** Every preset: the page's, then the user's. */
  get presets() {
    return [...BUILT_IN, ...this.#saved];
  }

  /** Shows which preset the settings are. */
  show() {
    const typed = this.#page.typed();
    const current = this.presets.findLast((preset) => isApplied(preset, typed)) ?? null;
    const hadFocus = this.#buttons.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.#buttons.replaceChildren(...this.presets.map((preset) => this.#button(preset, preset === current)));
    if (hadFocus) [...this.#buttons.children].find(({ textContent }) => textContent === hadFocus)?.focus();
    this.#words.textContent = current ? description(current) : "Settings of your own.";
    if (!this.#form) this.#offer(current);
  }

  #button(preset, isCurrent) {
    const made = button(preset.name, () => {
      this.#message.textContent = "";
      this.#page.onapply(preset);
    });
    made.title = description(preset);
    made.setAttribute("aria-pressed", String(isCurrent));
    return made;
  }

  #offer(current) {
    const wanted = current === null ? ["save"] : this.#saved.includes(current) ? ["rename", "delete"] : [];
    const names = [...wanted, "compare"].join();
    if (this.#actions.dataset.names === names && this.#actions.dataset.of === (current?.name ?? "")) return; // keeps the focus
    Object.assign(this.#actions.dataset, { names, of: current?.name ?? "" });
    const offers = {
      save: () => button("Save as a preset", () => this.#ask("", (name) => this.#save(name)), "quiet"),
      rename: () => button("Rename", () => this.#ask(current.name, (name) => this.#rename(current, name)), "quiet"),
      delete: () => button("Delete", () => this.#delete(current), "quiet"),
      compare: () => button("Compare \u2026", () => this.#page.oncompare(), "quiet"),
    };
    this.#actions.replaceChildren(...[...wanted, "compare"].map((name) => offers[name]()));
  }

  // Asks for a name in place of the actions. Enter takes it, Escape and Cancel do not.
  #ask(before, take) {
    const field = Object.assign(element("input"), { type: "text", value: before, autocomplete: "off", required: true });
    field.setAttribute("aria-label", "Name of the preset");
    const submit = Object.assign(element("button", "Save"), { type: "submit" });
    this.#form = put(classed("form", "preset-name"), field, submit, button("Cancel", () => this.#answered()));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#attempt(() => {
        take(field.value);
        this.#answered();
      });
    });
    this.#form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // Escape stops a run, but not from here
      this.#answered();
    });
    this.#actions.replaceChildren(this.#form);
    field.focus();
    field.select();
  }

  #answered() {
    this.#form = null;
    this.#actions.dataset.names = "";
    this.show();
    (this.#buttons.querySelector('[aria-pressed="true"]') ?? this.#actions.firstElementChild).focus();
  }

  #save(text) {
    const name = newName(text, this.#saved);
    this.#store([...this.#saved, { name, settings: settingsOf(this.#page.typed()) }], `Saved ${name}.`);
  }

  #rename(preset, text) {
    const name = newName(text, this.#saved.filter((one) => one !== preset));
    this.#store(this.#saved.map((one) => (one === preset ? { ...preset, name } : one)), `Renamed to ${name}.`);
  }

  #delete(preset) {
    const before = this.#saved;
    this.#store(before.filter((one) => one !== preset), `Deleted ${preset.name}. `);
    const undo = button("Undo", () => {
      this.#store(before, `Restored ${preset.name}.`);
      this.#answered();
    }, "quiet");
    this.show();
    this.#message.append(undo);
    undo.focus();
  }

  #store(presets, message) {
    this.#saved = presets;
    try {
      localStorage.setItem(KEY, JSON.stringify(presets));
      this.#message.textContent = message;
    } catch {
      this.#message.textContent = `${message} This browser does not store it beyond this visit.`;
    }
  }

  #read() {
    try {
      this.#saved = parsed(localStorage.getItem(KEY));
    } catch {
      this.#saved = []; // storage is switched off
    }
  }

  #attempt(work) {
    try {
      work();
    } catch (error) {
      if (!(error instanceof PresetError)) throw error;
      this.#message.textContent = error.message;
    }
  }
}

function button(words, onclick, names = "") {
  return Object.assign(element("button", words), { type: "button", className: names, onclick });
}
