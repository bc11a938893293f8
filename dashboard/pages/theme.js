// Runs before anything is drawn, so that a page never flashes in the wrong colours.
try {
  const kept = localStorage.getItem("weft-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch {}
