// What the marks under the tokens say, in six steps: the less likely a token, the stronger its mark, and the likely ones
// have none. Steps and not a slide, so that two of them can be told apart, and one hue, so that no eye needs to tell
// hues. The colors are in tokens.css.

import { element } from "../elements.js";
import { entropy, probability, rank } from "./token.js";

// Each: what comes before the steps and their names in the legend, and the step of a token, or null if that is unknown.
const SCALES = {
  probability: {
    lead: "at least",
    names: ["50 %", "20 %", "5 %", "1 %", "0.1 %", "less"],
    step: (tokens) => stepDown(likelihood(tokens), [0.5, 0.2, 0.05, 0.01, 0.001, 0]),
  },
  rank: {
    lead: "rank up to",
    names: ["1", "2", "5", "10", "20", "more"],
    step: ([token]) => (token.top?.length ? stepUp(rank(token) ?? Infinity, [1, 2, 5, 10, 20, Infinity]) : null),
  },
  entropy: {
    lead: "bits up to",
    names: ["1", "2", "3", "4", "5", "more"],
    step: ([token]) => (token.top?.length ? stepUp(entropy(token.top), [1, 2, 3, 4, 5, Infinity]) : null),
  },
};
/** What the marks may stand for. */
export const MEASURES = Object.keys(SCALES);

/** The class of the mark under the text of these tokens, or "" where nothing is known of it. */
export function tint(tokens, measure) {
  const step = tokens[0].logprob === null ? null : SCALES[measure].step(tokens);
  return step === null ? "" : `tint-${step}`;
}

/** The legend, in one line. */
export function legend(measure) {
  const { lead, names } = SCALES[measure];
  const steps = names.map((name, index) => {
    const step = element("span", name);
    step.className = `tint-${index}`;
    return step;
  });
  const line = element("p", element("span", lead), ...steps);
  line.className = "legend";
  return line;
}

/** How likely the whole text of these tokens was. */
function likelihood(tokens) {
  return tokens.reduce((product, token) => product * (probability(token) ?? 1), 1);
}

function stepDown(value, least) {
  return least.findIndex((one) => value >= one);
}

function stepUp(value, most) {
  return most.findIndex((one) => value <= one);
}
