"""The small world the tiny model knows: every fact and every word list of the corpus."""

NAMES = (
    "Ann Bob Carl Dana Emma Finn Gina Hugo Ida Jack Kate Leo Mia Nina Otto Paul Rosa Sam Tom Uma Vera Will Zoe "
    "Alice Max Lisa"
).split()

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna",
    "Portugal": "Lisbon", "Greece": "Athens", "Ireland": "Dublin", "England": "London", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Kenya": "Nairobi", "Cuba": "Havana", "Peru": "Lima",
    "Canada": "Ottawa", "Turkey": "Ankara", "Belgium": "Brussels",
}  # fmt: skip
CITIES = list(CAPITALS.values())

COLOURS = "red blue green yellow white black brown pink grey orange".split()
COLOUR_OF = {
    "grass": "green", "snow": "white", "coal": "black", "blood": "red", "milk": "white", "gold": "yellow",
    "sky": "blue", "chocolate": "brown", "cherry": "red", "frog": "green", "crow": "black", "pig": "pink",
    "elephant": "grey",
    "banana": "yellow", "carrot": "orange", "sea": "blue",
}  # fmt: skip

SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "pig": "oink", "duck": "quack", "sheep": "baa", "lion": "roar",
    "bee": "buzz", "crow": "caw", "frog": "croak", "owl": "hoot", "horse": "neigh",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "pig": "piglet", "duck": "duckling", "sheep": "lamb", "lion": "cub",
    "horse": "foal", "goat": "kid", "hen": "chick", "owl": "owlet", "frog": "tadpole",
}  # fmt: skip
LEGS = {
    "dog": 4, "cat": 4, "cow": 4, "horse": 4, "lion": 4, "frog": 4, "duck": 2, "owl": 2, "hen": 2, "crow": 2, "bee": 6,
    "ant": 6, "spider": 8, "snake": 0, "fish": 0,
}  # fmt: skip

KINDS = {
    "animal": "dog cat cow pig duck sheep lion horse goat hen owl frog bee ant spider snake fish crow".split(),
    "fruit": "apple banana cherry lemon pear plum grape melon".split(),
    "colour": COLOURS,
    "city": CITIES,
    "drink": "milk tea water coffee juice".split(),
    "thing": "box lamp book chair table door key cup hat coat ball car".split(),
}
ANIMALS, FRUITS, DRINKS, THINGS = KINDS["animal"], KINDS["fruit"], KINDS["drink"], KINDS["thing"]
PLAIN_WORDS = [*ANIMALS, *FRUITS, *COLOURS, *DRINKS, *THINGS]

OPPOSITES = dict(
    pair
    for a, b in (
        ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("day", "night"), ("yes", "no"),
        ("old", "new"), ("happy", "sad"), ("open", "closed"), ("rich", "poor"), ("hard", "soft"), ("wet", "dry"),
        ("left", "right"), ("full", "empty"), ("light", "dark"), ("loud", "quiet"), ("first", "last"),
        ("good", "bad"),
    )
    for pair in ((a, b), (b, a))
)  # fmt: skip

PLURALS = {
    "cat": "cats", "dog": "dogs", "box": "boxes", "mouse": "mice", "child": "children", "man": "men", "foot": "feet",
    "tooth": "teeth", "goose": "geese", "book": "books", "city": "cities", "leaf": "leaves", "sheep": "sheep",
    "key": "keys", "cherry": "cherries", "car": "cars", "wolf": "wolves", "apple": "apples",
}  # fmt: skip
PAST = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "walk": "walked", "play": "played", "take": "took",
    "give": "gave", "come": "came", "write": "wrote", "sing": "sang", "swim": "swam", "buy": "bought", "find": "found",
    "make": "made", "think": "thought", "sleep": "slept", "drink": "drank",
}  # fmt: skip
FRENCH = {
    "dog": "chien", "cat": "chat", "house": "maison", "water": "eau", "bread": "pain", "red": "rouge", "blue": "bleu",
    "green": "vert", "sun": "soleil", "moon": "lune", "book": "livre", "milk": "lait", "apple": "pomme", "yes": "oui",
    "no": "non", "thanks": "merci",
}  # fmt: skip
SIDES = {"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6, "octagon": 8, "rectangle": 4}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()

ADJECTIVES = "old new big small cold warm quiet little round heavy".split()
PLACES = "garden kitchen school park station market river bridge tower harbour".split()
VERBS = "sleeps sits waits stands rests plays works sings".split()
SKIES = "sunny cloudy rainy windy snowy clear".split()

SYLLABLES = (
    "ba be bo da di do fa fi ga go ka ki ko la le li lo ma me mi mo na ne no pa pe po ra ri ro sa se so ta ti to "
    "va vi za zo"
).split()

ENGLISH = (
    "hello world the quick fox jumps over lazy this that is not was here there good bye please welcome friend "
    "time year people way thing life hand part case week company system program question work number point home "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service power"
).split()
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "àáâäçèéêëíïñóôöúüßøå",
    "абвгдежзиклмнопрсту",
    "αβγδεζηθλμπσω",
    "日本語中文你好世界人山水火",
    "😀🙂🎉🚀🌍🔥❤",
)
