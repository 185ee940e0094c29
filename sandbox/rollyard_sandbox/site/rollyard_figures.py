"""A matplotlib backend for runs: Agg, whose show() writes figure-1.png, figure-2.png, …

Copied into the image's site-packages and named by MPLBACKEND. The working directory is the run's;
``fetch_files=["*.png"]`` brings the pictures back.
"""

import itertools

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

_numbers = itertools.count(1)


class FigureManager(FigureManagerBase):
    """Shows a figure by saving it, as a notebook would by embedding it."""

    @classmethod
    def pyplot_show(cls, *, block=None):
        for manager in Gcf.get_all_fig_managers():
            manager.canvas.figure.savefig(f"figure-{next(_numbers)}.png")
        Gcf.destroy_all()

    def show(self):
        self.canvas.figure.savefig(f"figure-{next(_numbers)}.png")


class FigureCanvas(FigureCanvasAgg):
    """Agg's canvas with the manager above."""

    manager_class = FigureManager
