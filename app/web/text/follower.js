// Keeps the end of a growing text in view, unless the reader has scrolled up. It looks at the layout only after the browser
// has made it (ResizeObserver): a script that reads the layout between two writes makes the browser lay out twice.

const NEAR = 24; // px from the bottom that count as the bottom

export class Follower {
  #scroller;
  #content;
  #end = 0; // of the text when it was last laid out, px
  #height = 0; // of the scroller then, px
  #isGrowing = false;

  /** `content`: the element in `scroller` that has the text. */
  constructor(scroller, content) {
    [this.#scroller, this.#content] = [scroller, content];
    const observer = new ResizeObserver(() => this.#resized());
    observer.observe(scroller);
    observer.observe(content);
  }

  /** Scrolls to the end of the text. */
  follow() {
    this.#scroller.scrollTop = 1e9; // clamped to the end
  }

  /** Text was appended. */
  grew() {
    this.#isGrowing = true;
  }

  /** Other changes of the text, which do not move it. */
  rest() {
    this.#isGrowing = false;
  }

  // The scroller gets lower, for example, because a phone's keyboard opens.
  #resized() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const isSeen = this.#content.offsetParent !== null; // or another view is shown
    const wasAtEnd = this.#end - scrollTop - this.#height < NEAR;
    if (isSeen && wasAtEnd && (this.#isGrowing || clientHeight !== this.#height)) this.follow();
    [this.#end, this.#height] = [isSeen ? scrollHeight : Infinity, clientHeight];
  }
}
