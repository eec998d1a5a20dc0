import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.Arrays;
import java.util.stream.Collectors;

/** Send texts to a model server: java Client.java URL TEXT [TEXT ...] */
public class Client {
  public static void main(String[] arguments) throws Exception {
    String texts =
        Arrays.stream(arguments).skip(1).map(Client::quoted).collect(Collectors.joining(", "));
    HttpRequest request =
        HttpRequest.newBuilder(URI.create(arguments[0] + ":predict"))
            .POST(HttpRequest.BodyPublishers.ofString("{\"instances\": [" + texts + "]}"))
            .build();
    HttpResponse<String> response =
        HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
    System.out.println(response.body());
    System.exit(response.statusCode() == 200 ? 0 : 1);
  }

  /** Return a JSON string. Use the JSON library of your project instead. */
  private static String quoted(String text) {
    StringBuilder json = new StringBuilder("\"");
    for (char character : text.toCharArray()) {
      json.append(
          character == '"' || character == '\\' || character < ' '
              ? String.format("\\u%04x", (int) character)
              : String.valueOf(character));
    }
    return json.append('"').toString();
  }
}
