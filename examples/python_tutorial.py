# %% [markdown]
# # dpro-search from Python
#
# A file of cells: VS Code, PyCharm and Spyder run it cell by cell, `jupytext --to ipynb` makes a notebook of it, and
# `python examples/python_tutorial.py` runs it as a script. It needs `pip install 'dpro-search[notebook]'`.

# %%
import dpro_search

# %% [markdown]
# ## What was recorded
#
# `load()` opens the bundled sample: two ranks that train a GPT-2 with PyTorch's DistributedDataParallel over links of
# 1 Gbit/s. `load("trace")` opens a folder that `dpro-search collect` wrote; `import_trace(["rank0.json", "rank1.json"],
# "trace")` reads profiles of other tools.

# %%
job = dpro_search.load()
print(job)
events = job.to_frame()  # one row for each event; job.columns() needs no pandas
print(events.groupby(["rank", "kind"])["name"].count())

# %% [markdown]
# One step, the replayed lanes above the recorded ones.

# %%
job.plot(rank=0)

# %% [markdown]
# ## What the replay predicts
#
# First the recorded setting, where the recording says how wrong the replay is; then other settings.

# %%
now = job.replay()
print(f"{now.iteration_us / 1e3:.0f} ms predicted, {now.measured_us / 1e3:.0f} ms measured")
now.plot()

# %%
slower = job.replay(changes={"rate": "500mbit"})
larger = job.replay(changes={"ranks": 8})
for name, found in {"500 Mbit/s": slower, "8 ranks": larger}.items():
    print(f"{name}: {found.iteration_us / now.iteration_us:.2f} times as long")

# %% [markdown]
# ## What it waits for

# %%
diagnosis = job.diagnose()
for finding in diagnosis.findings:
    print(finding)
diagnosis.plot()

# %% [markdown]
# ## A better plan
#
# A search keeps its results in a folder: the same call, or `dpro-search run --out run`, continues it.

# %%
run = job.search(trials=60, sampler="mcmc", allow_lossy=True, out="run")
print(run.best)
print(run.to_frame()[["plan", "speedup", "gain_certain"]])
run.plot()

# %% [markdown]
# ## Use it
#
# `export` writes what a real job reads, `validate` runs the plans for real, and `report` writes a page for others.

# %%
if run.best != dpro_search.Plan():
    exported = run.export("tuned")
    print(exported.usage)
print(run.report("run.html"))
