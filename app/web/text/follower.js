// Keeps the end of a growing text in view, unless the reader has scrolled up. It looks at the layout only after the browser
// has made it (ResizeObserver): a script that reads the layout between two writes makes the browser lay out twice.

const NEAR = 24; // px from the bottom that count as the bottom

export class Follower {
  #scroller;
  #content;
  #staysAtEnd;
  #width = 0; // of the scroller with its scroll bar when it was last laid out, px; 0 while the text is hidden
  #end = 0; // of the text then, px
  #height = 0; // of the scroller then, px
  #isGrowing = false;

  /** `content`: the element in `scroller` that has the text; `staysAtEnd`: whether the end also stays in view when the
      scroller gets lower, for example because a phone's keyboard opens. */
  constructor(scroller, content, { staysAtEnd = false } = {}) {
    [this.#scroller, this.#content, this.#staysAtEnd] = [scroller, content, staysAtEnd];
    const observer = new ResizeObserver((entries) => this.#resized(entries));
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

  // A new width moves all lines, and another view may have been shown: neither is growth. A scroll bar that appears is.
  #resized(entries) {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const width = this.#content.offsetParent ? this.#scroller.offsetWidth : 0;
    const isNear = (end) => end - scrollTop - this.#height < NEAR;
    const hasGrown = this.#isGrowing && scrollHeight > this.#end && width === this.#width && isNear(this.#end);
    const isScroller = entries.some(({ target }) => target === this.#scroller);
    const stays = this.#staysAtEnd && isScroller && isNear(scrollHeight);
    if (width > 0 && (hasGrown || stays)) this.follow();
    [this.#width, this.#end, this.#height, this.#isGrowing] = [width, scrollHeight, clientHeight, false];
  }
}
