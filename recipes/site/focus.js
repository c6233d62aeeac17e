// What scrolls sideways can be reached by the keyboard.
const reach = () => {
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre, .md-typeset pre > code, figure").forEach(part => {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  });
};
for (const event of ["load", "focusin", "resize"]) addEventListener(event, reach);
