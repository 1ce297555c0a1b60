// The site follows the reader's light or dark setting.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const follow = () => { document.documentElement.dataset.bsTheme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", follow);
follow();
