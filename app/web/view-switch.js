// The switch between the two views of the text: writing and inspecting.

export class ViewSwitch {
  #elements;
  #parts;

  /** `elements`: { scroller, write, buttons: { write, inspect } }; `parts`: { sheet, reading, announcer }. */
  constructor(elements, parts) {
    [this.#elements, this.#parts] = [elements, parts];
    elements.buttons.write.addEventListener("click", () => this.look(false));
    elements.buttons.inspect.addEventListener("click", () => this.look(true));
  }

  /** Shows one of the views, by default the other one. Both set the same lines, so the place on the sheet stays. */
  look(isInside = !this.#parts.reading.isOpen) {
    const { scroller, write, buttons } = this.#elements;
    const { sheet, reading, announcer } = this.#parts;
    const { scrollTop } = scroller;
    const hadFocus = scroller.contains(document.activeElement);
    write.hidden = isInside;
    buttons.write.setAttribute("aria-pressed", String(!isInside));
    buttons.inspect.setAttribute("aria-pressed", String(isInside));
    announcer.muted = isInside; // there each token is a thing to read by itself
    if (isInside) reading.open({ withFocus: hadFocus });
    else reading.close();
    if (!isInside && hadFocus) sheet.focus();
    scroller.scrollTop = scrollTop;
  }
}
