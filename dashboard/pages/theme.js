// Runs before anything is drawn, so that pages do not flash in the wrong colours.
try {
  const kept = localStorage.getItem("weft-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch {}
