// The site follows the reader's light or dark setting.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const follow = () => { document.documentElement.dataset.bsTheme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", follow);
follow();

// Pages opened from the disk may start no worker, so there this stands in for the one that mkdocs' search talks to.
// search/index.js, which docs/site.py writes, has the texts.
if (window.location.protocol === "file:") {
  window.Worker = class {
    constructor() {
      const script = document.createElement("script");
      script.src = `${base_url}/search/index.js`;
      script.onload = () => {
        this.onmessage({ data: { config: { min_search_length: 2 } } });
        this.onmessage({ data: { allowSearch: true } });
      };
      document.head.append(script);
    }

    postMessage({ query }) {
      if (!query) return;
      const words = query.toLowerCase().split(/\s+/).filter(Boolean);
      const count = (text, word) => text.toLowerCase().split(word).length - 1;
      const found = window.searchTexts
        .filter((page) => words.every((word) => count(`${page.title} ${page.text}`, word)))
        .map((page) => ({ ...page, rank: words.reduce((sum, word) => sum + 10 * count(page.title, word) + Math.min(5, count(page.text, word)), 0) }))
        .sort((a, b) => b.rank - a.rank);
      const results = found.slice(0, 20).map(({ location, title, text }) => {
        const start = Math.max(0, text.toLowerCase().indexOf(words[0]) - 80);
        return { location, title, summary: text.slice(start, start + 200) };
      });
      this.onmessage({ data: { results } });
    }
  };
}
