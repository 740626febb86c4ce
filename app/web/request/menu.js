// A button with a menu: opened by a click, Enter, Space or an arrow key; arrows, Home and End go through it, Escape and
// a click elsewhere close it.

import { element, put } from "../elements.js";

export class Menu {
  #button;
  #list = element("div");
  #onpick;

  /** `items` is { value: what it is called }; `onpick(value)` is called with the one that was chosen. */
  constructor(root, { label, items, onpick }) {
    this.#onpick = onpick;
    this.#button = put(element("button"), label);
    this.#button.type = "button";
    this.#button.setAttribute("aria-haspopup", "menu");
    this.#list.setAttribute("role", "menu");
    this.#list.setAttribute("aria-label", label);
    for (const [value, words] of Object.entries(items)) this.#list.append(this.#item(value, words));
    this.element = put(element("div"), this.#button, this.#list);
    this.element.className = "menu";
    root.append(this.element);
    this.#button.addEventListener("click", () => (this.#list.hidden ? this.#open() : this.#leave()));
    // Safari gives no focus to a button that is clicked: the list would lose it, and be gone before the click.
    this.element.addEventListener("mousedown", (event) => event.preventDefault());
    this.element.addEventListener("keydown", (event) => this.#pressed(event));
    this.element.addEventListener("focusout", ({ relatedTarget: to }) => this.element.contains(to) || this.#close());
    this.#close();
  }

  #item(value, words) {
    const item = put(element("button"), words);
    item.type = "button";
    item.tabIndex = -1;
    item.setAttribute("role", "menuitem");
    item.addEventListener("click", () => {
      this.#leave();
      this.#onpick(value);
    });
    return item;
  }

  #open(place = 0) {
    this.#list.hidden = false;
    this.#button.setAttribute("aria-expanded", "true");
    [...this.#list.children].at(place).focus();
  }

  #leave() {
    this.#button.focus(); // before the list goes, and what is in it
    this.#close();
  }

  #close() {
    this.#list.hidden = true;
    this.#button.setAttribute("aria-expanded", "false");
  }

  #pressed(event) {
    const items = [...this.#list.children];
    const at = items.indexOf(document.activeElement);
    const go = { ArrowDown: at + 1, ArrowUp: at < 0 ? -1 : at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Escape" && !this.#list.hidden) this.#leave();
    else if (go === undefined) return;
    else if (this.#list.hidden) this.#open(go);
    else items.at(go % items.length).focus();
    event.preventDefault();
    event.stopPropagation(); // Escape stops a run, but not from here
  }
}
