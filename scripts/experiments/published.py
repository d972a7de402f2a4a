"""Values of the paper, each with the mark of where it is known from.

[printed]   printed on the authors' posters (SoCC 2018, SysML 2018)
[read off]  read off a chart of theirs by pixel, with that error
[derived]   follows from printed values and the authors' formulas
[summary]   from the summary of the paper that this project began with
[assumed]   ours: an input where the paper's own value is not known; never shown as the paper's
"""

from __future__ import annotations

PRINTED, READ_OFF, DERIVED = "[printed]", "[read off]", "[derived]"
SUMMARY, ASSUMED = "[summary]", "[assumed]"

# Our names of the networks, in the order of the paper's tables, and the paper's short names.
NETWORKS = {
    "AlexNet": "AN",
    "VGG11": "V11",
    "VGG19": "V19",
    "GoogleNet299": "GN",
    "InceptionV3": "I3",
    "ResNet18": "RN18",
    "ResNet50": "RN50",
    "ResNet269": "RN269",
    "ResNext269": "RX269",
}

# Seconds of a batch on one GTX 1080 Ti.
BATCH_S = {
    "AlexNet": (0.0169, READ_OFF),
    "VGG11": (0.121, ASSUMED),
    "VGG19": (0.268, ASSUMED),
    "GoogleNet299": (0.1036, READ_OFF),
    "InceptionV3": (0.2241, READ_OFF),
    "ResNet18": (0.054, ASSUMED),
    "ResNet50": (0.161, ASSUMED),
    "ResNet269": (0.3467, READ_OFF),
    "ResNext269": (0.386, ASSUMED),
}
BATCH_SIZE = {name: 32 for name in NETWORKS} | {"ResNet269": 16, "ResNext269": 8}

FIGURE_1 = {  # samples per second of ResNet 269 on one GPU, [printed]
    "GRID K520": 3.77,
    "K80": 10.74,
    "M60": 14.27,
    "GTX 1080 Ti": 44.02,
    "V100": 64.57,
    "V100, tensor cores": 135.49,
}

TABLE_2 = {  # Gb/s (of 2^30 bits) that a parameter server needs, 8 workers, [printed]
    "AlexNet": {"CC": 1232, "CS": 308, "NCC": 1408, "NCS": 176},
    "GoogleNet299": {"CC": 40, "CS": 10, "NCC": 46, "NCS": 6},
    "InceptionV3": {"CC": 44, "CS": 11, "NCC": 50, "NCS": 6},
    "ResNet269": {"CC": 122, "CS": 31, "NCC": 140, "NCS": 17},
}
# Seconds of a batch that Table 2's numbers follow from, [derived].
TABLE_2_BATCH_S = {
    "AlexNet": 0.0172,
    "GoogleNet299": 0.1044,
    "InceptionV3": 0.2273,
    "ResNet269": 0.3476,
}

# Seconds of an iteration, 8 workers with colocated servers on EC2: (GPU active, all), [read off].
FIGURE_2 = {
    "AlexNet": {
        "K520": (0.14, 0.72),
        "K80": (0.07, 0.49),
        "M60": (0.05, 0.52),
        "V100": (0.007, 0.5),
    },
    "GoogleNet299": {
        "K520": (0.82, 0.84),
        "K80": (0.39, 0.42),
        "M60": (0.27, 0.33),
        "V100": (0.06, 0.18),
    },
    "InceptionV3": {
        "K520": (1.07, 1.11),
        "K80": (0.50, 0.56),
        "M60": (0.33, 0.54),
        "V100": (0.08, 0.17),
    },
    "ResNet269": {
        "K520": (1.05, 1.73),
        "K80": (0.56, 0.87),
        "M60": (0.35, 0.87),
        "V100": (0.14, 0.85),
    },
}

# Gbit/s between pairs of 8 EC2 hosts, which fall into two groups, [printed].
FIGURE_6_GROUPS = ((1, 3, 4, 5, 7), (2, 6, 8))
FIGURE_6_INSIDE, FIGURE_6_ACROSS = 8.95, 4.7

# PBox over MXNet's sharded server on the same InfiniBand, 10 Gbit/s, [printed].
FIGURE_12 = {
    "AlexNet": 2.7,
    "VGG11": 2.3,
    "VGG19": 2.2,
    "GoogleNet299": 1.3,
    "InceptionV3": 1.3,
    "ResNet18": 2.2,
    "ResNet50": 1.9,
    "ResNet269": 2.3,
    "ResNext269": 2.3,
}
FIGURE_13 = {"AlexNet": 2.0, "VGG11": 1.6, "VGG19": 1.2}  # the same at 56 Gbit/s, [derived]

# PBox over PShard, of speed-ups over stock MXNet that are printed (10 Gbit/s), and that are printed
# or read off (56 Gbit/s), [derived].
OVER_PSHARD_10 = {
    "AlexNet": 2.06,
    "VGG11": 1.94,
    "VGG19": 1.88,
    "GoogleNet299": 1.13,
    "InceptionV3": 1.09,
    "ResNet18": 1.77,
    "ResNet50": 1.60,
    "ResNet269": 1.81,
    "ResNext269": 1.85,
}
OVER_PSHARD_56 = {
    "AlexNet": 1.40,
    "VGG11": 1.24,
    "VGG19": 0.95,
    "GoogleNet299": 1.04,
    "InceptionV3": 1.00,
    "ResNet18": 1.03,
    "ResNet50": 1.04,
    "ResNet269": 1.03,
    "ResNext269": 1.03,
}

# Exchanges per second of ResNet 18 without compute, all workers together, [read off].
FIGURE_15 = {
    "pbox": {1: 109, 2: 216, 3: 321, 4: 425, 5: 521, 6: 623, 7: 705, 8: 791},
    "pshard": {1: 70, 2: 108, 3: 160, 4: 214, 5: 263, 6: 313, 7: 362, 8: 409},
    "halving_doubling": {2: 57, 3: 53, 4: 76, 5: 76, 6: 96, 7: 89, 8: 129},
    "ring": {2: 75, 3: 86, 4: 98, 5: 118, 6: 134, 7: 153, 8: 173},
}

FIGURE_16 = {  # exchanges per second by bytes of a chunk, [read off]
    4 << 10: 275,
    8 << 10: 527,
    16 << 10: 730,
    32 << 10: 768,
    64 << 10: 741,
    128 << 10: 708,
    256 << 10: 647,
    512 << 10: 482,
    1 << 20: 384,
    2 << 20: 189,
}

# 10^6 cache lines per second over PCIe by workers 1, 2, ..., [read off].
FIGURE_17_LIMIT = (200, 385, 570, 770, 963, 1156, 1315, 1370)
FIGURE_17_TRAINING = (178, 341, 504, 667, 822, 978, 1141, 1259)
FIGURE_17_SHARE = 0.97  # of training in the loop-back limit at its end, [derived]

FIGURE_18_COST = 0.05  # of AlexNet's throughput, with 8 jobs, [summary]

TABLE_5 = {"future GPUs": 0.25, "V100": 0.06, "cheap processors": 0.36}  # gain at 2:1, [summary]
