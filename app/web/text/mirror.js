// The document's text once more, in two inks: what the user wrote and what the model wrote. A line of the text is a
// block of its own, so that appending text lays out and paints its last line only.

import { element } from "../elements.js";

export class Mirror {
  #root;
  #block = null; // the line that the model writes into: the last one, where there is none
  #behind = []; // the spans of that line which stand behind it

  constructor(root) {
    this.#root = root;
  }

  /** While text comes at the end, a caret of the model's ink stands there. */
  set isStreaming(value) {
    this.#root.classList.toggle("streaming", value);
  }

  /** The whole text as it is now; `written`: [[start, end]] of what the model wrote. Touches only what differs. */
  paint(text, written) {
    this.close();
    const lines = split(text, written);
    const blocks = this.#root.children;
    while (blocks.length > lines.length) blocks[blocks.length - 1].remove();
    lines.forEach((parts, index) => paintLine(blocks[index] ?? this.#root.appendChild(element("div")), parts));
  }

  /** From now on text is appended at this offset of the text, and not at its end. */
  open(offset) {
    let rest = offset;
    for (const block of this.#root.children) {
      const { length } = block.textContent;
      if (rest <= length) {
        this.#behind = splitAt(block, rest);
        this.#behind[0]?.classList.add("ahead"); // the caret of the model's ink stands before it
        this.#block = block;
        return;
      }
      rest -= length + 1; // its line end
    }
  }

  close() {
    [this.#block, this.#behind] = [null, []];
  }

  /** Text of the model's, where it writes. */
  append(text) {
    const [first, ...more] = text.split("\n");
    this.#write(this.#block ?? this.#root.lastElementChild ?? this.#root.appendChild(element("div")), first);
    for (const line of more) this.#write(this.#newLine(), line);
  }

  #newLine() {
    const line = element("div");
    if (!this.#block) return this.#root.appendChild(line);
    this.#block.after(line);
    line.append(...this.#behind);
    this.#block = line;
    return line;
  }

  /** Where the character at this offset of the text stands in the window, as a DOMRect; null in an empty text. */
  place(offset) {
    let rest = offset;
    for (const block of this.#root.children) {
      const { length } = block.textContent;
      if (rest <= length) return rectAt(block, rest);
      rest -= length + 1; // its line end
    }
    return this.#root.lastElementChild?.getBoundingClientRect() ?? null;
  }

  #write(block, text) {
    if (text === "") return;
    const [first] = this.#behind;
    const last = first ? first.previousElementSibling : block.lastElementChild;
    if (last?.className === "written") last.lastChild.appendData(text);
    else block.insertBefore(span("written", text), first ?? null);
  }
}

function rectAt(block, offset) {
  let rest = offset;
  for (const { firstChild: text } of block.children) {
    if (rest <= text.length) {
      const range = document.createRange();
      range.setStart(text, rest);
      range.collapse(true);
      return [...range.getClientRects()].at(-1) ?? block.getBoundingClientRect();
    }
    rest -= text.length;
  }
  return block.getBoundingClientRect();
}

// The spans of this line behind the offset, of which one is cut in two where it must be.
function splitAt(block, offset) {
  let rest = offset;
  for (const one of block.children) {
    const { length } = one.textContent;
    if (rest < length) {
      if (rest > 0) one.after(span(one.className, cutOff(one.firstChild, rest)));
      return [...block.children].slice([...block.children].indexOf(one) + Number(rest > 0));
    }
    rest -= length;
  }
  return [];
}

function cutOff(text, offset) {
  const { data } = text;
  text.deleteData(offset, data.length - offset);
  return data.slice(offset);
}

function paintLine(block, parts) {
  const spans = block.children;
  while (spans.length > parts.length) spans[spans.length - 1].remove();
  parts.forEach(([kind, piece], index) => {
    const old = spans[index];
    if (!old) block.append(span(kind, piece));
    else {
      if (old.className !== kind) old.className = kind;
      if (old.textContent !== piece) old.textContent = piece;
    }
  });
}

function span(kind, text) {
  const made = element("span", text);
  made.className = kind;
  return made;
}

// A list for each line, of [kind, text]: own and written stretches in turn.
function split(text, written) {
  const lines = [[]];
  const put = (kind, stretch) => {
    const [first, ...more] = stretch.split("\n");
    if (first !== "") lines.at(-1).push([kind, first]);
    for (const line of more) lines.push(line === "" ? [] : [[kind, line]]);
  };
  let at = 0;
  for (const [start, end] of written) {
    put("own", text.slice(at, start));
    put("written", text.slice(start, end));
    at = end;
  }
  put("own", text.slice(at));
  return lines;
}
