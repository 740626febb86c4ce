// Scales of the marks under the tokens: six steps, the less likely a token the stronger its mark, none for likely ones.
// Distinct steps are easier to compare than a gradient, and a single hue works with color blindness. The colors are in
// tokens.css.

import { element } from "../elements.js";
import { entropy, probability, rank } from "./token.js";

// For each measure: the legend's lead text, the names of the steps, and the step of a unit, or null if it is unknown.
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
/** Names of the measures that the marks can show. */
export const MEASURES = Object.keys(SCALES);

/** The CSS class of the mark under these tokens, or "" if the measure is unknown. */
export function tint(tokens, measure) {
  const step = tokens[0].logprob === null ? null : SCALES[measure].step(tokens);
  return step === null ? "" : `tint-${step}`;
}

/** The legend of a measure, on one line. */
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

/** Joint probability of these tokens. */
function likelihood(tokens) {
  return tokens.reduce((product, token) => product * (probability(token) ?? 1), 1);
}

function stepDown(value, least) {
  return least.findIndex((one) => value >= one);
}

function stepUp(value, most) {
  return most.findIndex((one) => value <= one);
}
