def problems(html): return []
