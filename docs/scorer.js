// How the search ranks what it finds: a name's own row, titles, then pages by what they are for. Sphinx embeds this file.
const textScores = [
  [/^troubleshooting$/, 4],
  [/^reference\//, 3],
  [/^explanation\/(architecture|benchmarks|reading-the-code)$/, -2],
];
// Who enters a sentence looks for the text of an error.
const isSentence = (new URLSearchParams(location.search).get("q") ?? "").split(" ").length > 3;
var Scorer = {
  score: ([page, , , , score]) => {
    if (isSentence && page === "troubleshooting") return score + 15;
    return score > 5 ? score : score + (textScores.find(([pattern]) => pattern.test(page))?.[1] ?? 0);
  },
  objNameMatch: 20,
  objPartialMatch: 1,
  objPrio: {},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
