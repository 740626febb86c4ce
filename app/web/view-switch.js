// The switch between the views of the document: writing, inspecting, and the tree of its branches.

export class ViewSwitch {
  #elements;
  #parts;
  #places = {}; // how far each view was scrolled

  /** `elements`: { scroller, write, inspect, tree, buttons: { write, inspect, tree } }, the views and what shows them;
      `parts`: { sheet, reading, treeView, announcer }. */
  constructor(elements, parts) {
    [this.#elements, this.#parts] = [elements, parts];
    for (const [name, button] of Object.entries(elements.buttons)) button.addEventListener("click", () => this.show(name));
  }

  /** Shows this view, or goes back to writing where it is shown already; for a key, which takes the focus along. */
  toggle(name) {
    this.show(this.#elements[name].hidden ? name : "write", { withFocus: true });
  }

  /** Writing and inspecting set the same lines, so the place on the sheet stays. */
  show(name, { withFocus = this.#elements.scroller.contains(document.activeElement) } = {}) {
    const { scroller, buttons, tree } = this.#elements;
    const { sheet, reading, treeView, announcer } = this.#parts;
    if (!this.#elements[name].hidden) return;
    this.#places[tree.hidden ? "text" : "tree"] = scroller.scrollTop;
    for (const [other, button] of Object.entries(buttons)) {
      button.setAttribute("aria-pressed", String(other === name));
      if (other !== "inspect") this.#elements[other].hidden = other !== name;
    }
    announcer.muted = name !== "write"; // there each token or branch is a thing to read by itself
    if (name === "inspect") reading.open({ withFocus });
    else reading.close();
    scroller.scrollTop = this.#places[name === "tree" ? "tree" : "text"] ?? 0;
    if (name === "tree") treeView.open({ withFocus });
    if (name === "write" && withFocus) sheet.focus();
  }
}
