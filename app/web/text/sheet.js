// The sheet: one textarea, and a mirror behind it that shows the same text with the model's words in another ink (a
// textarea has one colour only). The mirror's height makes the textarea's, and both scroll together in `scroller`.
// While text streams it is seen in the mirror, with one write per animation frame; the textarea, which lays its whole
// text out again for every letter, follows now and then.

import { difference } from "./manuscript.js";
import { Mirror } from "./mirror.js";

const NEAR = 24; // px: so close to the bottom counts as being there
const LAG = 500; // ms that the textarea may be behind the mirror
const AT_ONE_GO = /^(insertFrom|insertReplacement|deleteByCut|deleteByDrag|history)/; // values of InputEvent.inputType

export class Sheet {
  #scroller;
  #area;
  #mirror;
  #unseen = ""; // text that is not in the mirror yet,
  #unwritten = ""; // and text that is not in the textarea yet
  #writtenAt = -Infinity;
  #frame = 0;
  #height = 0; // of the scroller, when it was last laid out
  #caretAtEnd = false;
  #place = null; // where the model writes: an offset that grows with its text, or null at the end

  /** `ontype(text, isStep)` is called when the user changed the text, by a key or, `isStep`, at one go. */
  constructor({ scroller, area, mirror }, { ontype }) {
    [this.#scroller, this.#area, this.#mirror] = [scroller, area, new Mirror(mirror)];
    area.addEventListener("input", ({ inputType }) => ontype(area.value, AT_ONE_GO.test(inputType)));
    new ResizeObserver(() => this.#resized()).observe(scroller);
  }

  focus() {
    this.#area.focus({ preventScroll: true });
  }

  /** The whole text as it is now; `written`: [[start, end]] of what the model wrote. The caret goes to the change, or to
      `caret`. */
  show(text, written, caret = null) {
    this.#forget();
    const { start, removed, added } = difference(this.#area.value, text);
    this.paint(text, written);
    if (removed || added) this.#area.value = text;
    else if (caret === null) return;
    const place = caret ?? start + added;
    this.#area.setSelectionRange(place, place);
    this.#reveal(place);
  }

  /** The mirror alone: the text stands in the textarea already. */
  paint(text, written) {
    this.#mirror.paint(text, written);
  }

  toEnd() {
    this.#caretToEnd();
    this.follow();
  }

  /** Selects all of the text, so that what is typed replaces it. */
  selectAll() {
    this.#area.select();
  }

  /** Scrolls to the end of the text. */
  follow() {
    this.#scroller.scrollTop = 1e9; // as far as it goes
  }

  /** The caret, or what is selected: { start, end }. */
  get selection() {
    const { selectionStart: start, selectionEnd: end } = this.#area;
    return { start, end };
  }

  /** From here to close() the text belongs to the stream: what the user types would land in its middle. `at`: where it
      comes, or null for the end. `isSeen`: in this view, so that one who was writing elsewhere is brought there. */
  open({ at = null, isSeen }) {
    const { selectionStart, selectionEnd, value } = this.#area;
    if (at === null && selectionStart === 0 && selectionEnd === value.length) this.#caretToEnd(); // all was selected
    this.#caretAtEnd = this.#area.selectionStart === value.length;
    this.#place = isSeen ? at : null;
    if (this.#place !== null) {
      this.#mirror.open(at);
      this.#area.setSelectionRange(at, at);
      this.#reveal(at);
    } else if (isSeen && !this.#caretAtEnd) this.follow();
    this.#area.readOnly = true;
    this.#mirror.isStreaming = isSeen && this.#place === null;
    this.#writtenAt = -Infinity; // what comes first is written at once: there may be a placeholder
  }

  /** Text from the model, where it writes. */
  append(text) {
    this.#unseen += text;
    this.#unwritten += text;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** Writes what is waiting, without waiting for the frame: a tab in the background draws none. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#draw(0);
  }

  close() {
    this.flush();
    this.#mirror.isStreaming = false;
    this.#area.readOnly = false;
    this.#place = null;
    // Who was writing at the end goes on writing at the new end; who selected something keeps it.
    const { selectionStart, selectionEnd } = this.#area;
    if (this.#caretAtEnd && selectionStart === selectionEnd) this.#caretToEnd();
  }

  // Scrolls as little as it takes to see the line of this place with the lines around it.
  #reveal(offset) {
    const line = this.#mirror.place(offset);
    if (!line || !this.#area.offsetParent) return; // another view of the text stands in its place
    const { top, bottom } = this.#scroller.getBoundingClientRect();
    const around = Math.min(2 * line.height, (bottom - top) / 3);
    if (line.top - around < top) this.#scroller.scrollTop += line.top - around - top;
    else if (line.bottom + around > bottom) this.#scroller.scrollTop += line.bottom + around - bottom;
  }

  #forget() {
    cancelAnimationFrame(this.#frame);
    [this.#unseen, this.#unwritten, this.#frame] = ["", "", 0];
  }

  // The view follows the text only for a reader who is at its end; who scrolled up to read stays there.
  #draw(lag = LAG) {
    if (this.#unwritten === "") return;
    const following = this.#isFollowing();
    if (this.#unseen !== "") this.#mirror.append(this.#unseen);
    if (this.#place !== null) this.#place += this.#unseen.length;
    [this.#unseen, this.#frame] = ["", 0];
    if (performance.now() - this.#writtenAt >= lag) this.#write();
    if (following && this.#place !== null) this.#reveal(this.#place);
    else if (following) this.follow();
  }

  #isFollowing() {
    if (this.#place === null) return this.#atEnd(this.#scroller.clientHeight);
    const { top, bottom } = this.#scroller.getBoundingClientRect();
    const line = this.#mirror.place(this.#place);
    return line !== null && line.bottom > top && line.top < bottom;
  }

  // The same where the sheet gets lower: what came under it, or a phone's keyboard, does not hide the end. Not while
  // another view of the text stands in its place.
  #resized() {
    if (this.#area.offsetParent && this.#atEnd(this.#height)) this.follow();
    this.#height = this.#scroller.clientHeight;
  }

  #atEnd(height) {
    const { scrollTop, scrollHeight } = this.#scroller;
    return scrollHeight - scrollTop - height < NEAR;
  }

  #write() {
    const at = this.#place === null ? this.#area.value.length : this.#place - this.#unwritten.length;
    this.#area.setRangeText(this.#unwritten, at, at, this.#place === null ? "preserve" : "end");
    this.#unwritten = "";
    this.#writtenAt = performance.now();
  }

  #caretToEnd() {
    this.#area.setSelectionRange(this.#area.value.length, this.#area.value.length);
  }
}
