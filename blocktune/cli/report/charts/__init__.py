"""Charts of the report as Vega-Lite specs, built by Altair. They hold no data: the page fills them in."""
