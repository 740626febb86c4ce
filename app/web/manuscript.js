// The document: one textarea that text streams into at its end, at most one write per animation frame, and the
// text it held before. Knows nothing of where the text comes from: no server, no events, no storage.

const LINE = 24; // px: so close to the bottom counts as being there

export class Manuscript {
  #area;
  #pending = "";
  #frame = 0;
  #caretAtEnd = false;
  #before = ""; // the text at open()
  #other = null; // the text that swap() brings back
  #undone = false;

  constructor(area) {
    this.#area = area;
  }

  get text() {
    return this.#area.value;
  }

  replace(text) {
    this.#area.value = text;
    this.caretToEnd();
    this.#area.scrollTop = this.#area.scrollHeight;
  }

  /** From here to close() the text belongs to the stream: what the user types would land in its middle. */
  open() {
    this.#caretAtEnd = this.#area.selectionStart === this.#area.value.length;
    this.#area.readOnly = true;
    this.#before = this.text;
  }

  append(text) {
    // Not at open(): a run that brings nothing leaves the undo of the one before it alone.
    [this.#other, this.#undone] = [this.#before, false];
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.#write());
  }

  /** Writes what is waiting, without waiting for the frame: a tab in the background draws none. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#write();
  }

  close() {
    cancelAnimationFrame(this.#frame);
    this.#write(true);
    this.#area.readOnly = false;
    // Who was writing at the end goes on writing at the new end; who selected something keeps it.
    const { selectionStart, selectionEnd } = this.#area;
    if (this.#caretAtEnd && selectionStart === selectionEnd) this.caretToEnd();
  }

  /** What swap() would do now: "undo" the last stream, "redo" it, or null. */
  get swappable() {
    if (this.#other === null || this.#area.readOnly) return null;
    return this.#undone ? "redo" : "undo";
  }

  /** Back to the text before the last stream, and forth again: a swap, so that what was typed since is not lost. */
  swap() {
    if (this.swappable === null) return;
    const text = this.text;
    this.replace(this.#other);
    [this.#other, this.#undone] = [text, !this.#undone];
  }

  caretToEnd() {
    this.#area.setSelectionRange(this.#area.value.length, this.#area.value.length);
  }

  #write(last = false) {
    this.#frame = 0;
    // A textarea turns CR LF into one LF, but only inside one write: a CR at the edge waits for its LF.
    const edge = !last && this.#pending.endsWith("\r") ? this.#pending.length - 1 : this.#pending.length;
    const text = this.#pending.slice(0, edge);
    this.#pending = this.#pending.slice(edge);
    if (text !== "") this.#appendInView(text);
  }

  // The view follows the text only for a reader who is at its end; who scrolled up to read stays there.
  #appendInView(text) {
    const area = this.#area;
    const top = area.scrollTop;
    const following = area.scrollHeight - top - area.clientHeight < LINE;
    const end = area.value.length;
    area.setRangeText(text, end, end, "preserve");
    area.scrollTop = following ? area.scrollHeight : top;
  }
}
