// A menu button (ARIA practices): a click, Enter, Space or an arrow key opens it; arrow keys, Home and End move in it;
// Escape and a click elsewhere close it. The list is a popover, so that nothing covers it.

import { element, put } from "../elements.js";

const GAP = 4; // px between button, list and window

export class Menu {
  #button;
  #list = element("div");
  #onpick;
  #following = null; // the AbortController of the listeners that keep the list next to its button

  /** `items`: { value: label }; `onpick(value)`: the user chose this item. */
  constructor(root, { label, items, onpick }) {
    this.#onpick = onpick;
    this.#button = put(element("button"), label);
    this.#button.type = "button";
    this.#button.setAttribute("aria-haspopup", "menu");
    this.#list.popover = "manual";
    this.#list.setAttribute("role", "menu");
    this.#list.setAttribute("aria-label", label);
    for (const [value, words] of Object.entries(items)) this.#list.append(this.#item(value, words));
    this.element = put(element("div"), this.#button, this.#list);
    this.element.className = "menu";
    root.append(this.element);
    this.#button.addEventListener("click", () => (this.#isOpen ? this.#leave() : this.#open()));
    // Safari does not focus a clicked button: the list would lose the focus and close before the click.
    this.element.addEventListener("mousedown", (event) => event.preventDefault());
    this.element.addEventListener("keydown", (event) => this.#pressed(event));
    this.element.addEventListener("focusout", ({ relatedTarget: to }) => this.element.contains(to) || this.#close());
    this.#button.setAttribute("aria-expanded", "false");
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

  get #isOpen() {
    return this.#list.matches(":popover-open");
  }

  #open(place = 0) {
    this.#list.showPopover();
    this.#following = new AbortController();
    const options = { capture: true, passive: true, signal: this.#following.signal };
    for (const event of ["scroll", "resize"]) addEventListener(event, () => this.#place(), options);
    this.#place();
    this.#button.setAttribute("aria-expanded", "true");
    [...this.#list.children].at(place).focus({ preventScroll: true });
  }

  #leave() {
    this.#button.focus(); // before the focused item disappears
    this.#close();
  }

  // Below the button, or above it if there is no room below.
  #place() {
    const { left, top, bottom } = this.#button.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.#list;
    const isBelow = bottom + GAP + height <= innerHeight;
    this.#list.style.left = `${Math.max(Math.min(left, innerWidth - width - GAP), GAP)}px`;
    this.#list.style.top = `${Math.max(isBelow ? bottom + GAP : top - GAP - height, GAP)}px`;
  }

  #close() {
    this.#following?.abort();
    if (this.#isOpen) this.#list.hidePopover();
    this.#button.setAttribute("aria-expanded", "false");
  }

  #pressed(event) {
    const items = [...this.#list.children];
    const at = items.indexOf(document.activeElement);
    const go = { ArrowDown: at + 1, ArrowUp: at < 0 ? -1 : at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Escape" && this.#isOpen) this.#leave();
    else if (go === undefined) return;
    else if (!this.#isOpen) this.#open(go);
    else items.at(go % items.length).focus();
    event.preventDefault();
    event.stopPropagation(); // the page's own Escape stops the run
  }
}
