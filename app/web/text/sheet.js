// The sheet: a textarea over a mirror that shows the same text with the model's words in another color, since a textarea
// has only one. The mirror sets the height of both, and they scroll together in `scroller`. Streamed text appears in the
// mirror, one write per animation frame; the textarea, which lays out its whole text for every change, is updated less
// often.

import { Follower } from "./follower.js";
import { difference } from "./manuscript.js";
import { Mirror } from "./mirror.js";

const LAG = 500; // ms by which the textarea may lag behind the mirror
const AT_ONE_GO = /^(insertFrom|insertReplacement|deleteByCut|deleteByDrag|history)/; // values of InputEvent.inputType

export class Sheet {
  #scroller;
  #area;
  #mirror;
  #follower;
  #unseen = ""; // text that is not yet in the mirror
  #unwritten = ""; // text that is not yet in the textarea
  #writtenAt = -Infinity;
  #frame = 0;
  #timer = 0; // instead of a frame while another view is shown
  #caretAtEnd = false;
  #place = null; // offset where the model writes, which grows with its text; null at the end

  /** `ontype(text, isStep)`: the user changed the text; `isStep`: not by typing but by pasting, cutting or the like. */
  constructor({ scroller, area, mirror }, { ontype }) {
    [this.#scroller, this.#area, this.#mirror] = [scroller, area, new Mirror(mirror)];
    area.addEventListener("input", ({ inputType }) => ontype(area.value, AT_ONE_GO.test(inputType)));
    this.#follower = new Follower(scroller, mirror, { staysAtEnd: true });
  }

  focus() {
    this.#area.focus({ preventScroll: true });
  }

  /** Shows the whole text; `written`: [[start, end]] of what the model wrote. Moves the caret to `caret`, or to the
      change. */
  show(text, written, caret = null) {
    this.#forget();
    const { start, removed, added } = difference(this.#area.value, text);
    this.paint(text, written);
    if (removed || added) this.#area.value = text;
    else if (caret === null) return;
    const place = caret ?? start + added;
    this.#caretTo(place);
    this.#reveal(place);
  }

  /** Updates the mirror, for text that the textarea already has. */
  paint(text, written) {
    this.#follower.rest();
    this.#mirror.paint(text, written);
  }

  toEnd() {
    this.#caretToEnd();
    this.#follower.follow();
  }

  /** Selects the whole text, so that typing replaces it. */
  selectAll() {
    this.#area.select();
  }

  /** The caret or selection: { start, end }. */
  get selection() {
    const { selectionStart: start, selectionEnd: end } = this.#area;
    return { start, end };
  }

  /** Makes the text read-only until close(), since typed text would land in the middle of the stream. `at`: the stream's
      offset, or null for the end. `isSeen`: whether this view shows it, and therefore scrolls there. */
  open({ at = null, isSeen }) {
    const { selectionStart, selectionEnd, value } = this.#area;
    if (at === null && selectionStart === 0 && selectionEnd === value.length) {
      if (document.activeElement !== this.#area) document.getSelection().removeAllRanges(); // see #caretTo()
      this.#caretToEnd(); // drops "select all"
    }
    this.#caretAtEnd = this.#area.selectionStart === value.length;
    this.#place = isSeen ? at : null;
    if (this.#place !== null) {
      this.#mirror.open(at);
      this.#caretTo(at);
      this.#reveal(at);
    } else if (isSeen && !this.#caretAtEnd) this.#follower.follow();
    this.#area.readOnly = true;
    this.#mirror.isStreaming = isSeen && this.#place === null;
    this.#writtenAt = -Infinity; // writes the first text at once, which may replace a placeholder
  }

  /** Appends text from the model at its position. */
  append(text) {
    this.#unseen += text;
    this.#unwritten += text;
    if (this.#area.parentElement.hidden) this.#timer ||= setTimeout(() => this.flush(), LAG);
    else this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** Writes pending text at once: a tab in the background gets no animation frames, and a hidden view none either. */
  flush() {
    this.#cancel();
    this.#draw(0);
  }

  close() {
    this.flush();
    this.#mirror.isStreaming = false;
    this.#area.readOnly = false;
    this.#place = null;
    // A caret at the end moves to the new end; a selection stays.
    const { selectionStart, selectionEnd } = this.#area;
    if (this.#caretAtEnd && selectionStart === selectionEnd) this.#caretToEnd();
  }

  // Scrolls as little as possible to show the line of this offset and those around it.
  #reveal(offset) {
    const line = this.#mirror.place(offset);
    if (!line || !this.#area.offsetParent) return; // another view is shown
    const { top, bottom } = this.#scroller.getBoundingClientRect();
    const around = Math.min(2 * line.height, (bottom - top) / 3);
    if (line.top - around < top) this.#scroller.scrollTop += line.top - around - top;
    else if (line.bottom + around > bottom) this.#scroller.scrollTop += line.bottom + around - bottom;
  }

  #forget() {
    this.#cancel();
    [this.#unseen, this.#unwritten] = ["", ""];
  }

  #cancel() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    [this.#frame, this.#timer] = [0, 0];
  }

  // Scrolls along with the text only if the reader sees its end, not if they scrolled away.
  #draw(lag = LAG) {
    if (this.#unwritten === "") return;
    const following = this.#place !== null && this.#isInSight();
    if (this.#unseen !== "") this.#mirror.append(this.#unseen);
    if (this.#place === null) this.#follower.grew();
    else this.#place += this.#unseen.length;
    [this.#unseen, this.#frame] = ["", 0];
    if (performance.now() - this.#writtenAt >= lag) this.#write();
    if (following) this.#reveal(this.#place);
  }

  #isInSight() {
    const { top, bottom } = this.#scroller.getBoundingClientRect();
    const line = this.#mirror.place(this.#place);
    return line !== null && line.bottom > top && line.top < bottom;
  }

  #write() {
    const at = this.#place === null ? this.#area.value.length : this.#place - this.#unwritten.length;
    this.#area.setRangeText(this.#unwritten, at, at, this.#place === null ? "preserve" : "end");
    this.#unwritten = "";
    this.#writtenAt = performance.now();
  }

  #caretToEnd() {
    this.#caretTo(this.#area.value.length);
  }

  #caretTo(place) {
    // Chromium would soon restore the selection that the document has in a text without the focus.
    const selected = document.getSelection();
    if (document.activeElement !== this.#area && selected.anchorNode === this.#area.parentElement)
      selected.removeAllRanges();
    this.#area.setSelectionRange(place, place);
  }
}
